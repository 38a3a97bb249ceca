// Whether the NEON kernels compute what those of plain C++ do, to the bit, and a row the same in any company.
//
// `agree CASE` fails, with a line that says where, if they do not; `agree isa` says which set would be used here.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pack.h"

extern "C" const char* tandem_isa();

namespace {

const Kernels& plain = kernels_scalar;
const Kernels& neon = kernels_neon;
std::mt19937 generator(1);

template <class T>
void expect_same(const T* found, const T* expected, size_t count, const char* what, int of, int at = 0) {
    if (std::memcmp(found, expected, count * sizeof(T)) == 0) return;
    std::printf("%s: case %d, at %d: not the same bits\n", what, of, at);
    std::exit(1);
}

// Numbers of many sizes, some of them halfway between two integers, some zero.
std::vector<float> numbers(size_t count, float scale = 1.0f) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& x : values) {
        const unsigned kind = generator() % 8;
        x = normal(generator) * scale * (kind == 0 ? 1e-3f : kind == 1 ? 50.0f : 1.0f);
        if (kind == 2) x = scale * ((float)(int)(generator() % 255) - 127.0f + 0.5f);
        if (kind == 3) x = 0.0f;
    }
    return values;
}

// `run(kernels, out [count])` by both.
void compare(const char* what, int of, size_t count, const std::function<void(const Kernels&, float*)>& run) {
    std::vector<float> found(count, 7.0f), expected(count, 7.0f);
    run(neon, found.data()), run(plain, expected.data());
    expect_same(found.data(), expected.data(), count, what, of);
}

// A matrix as a file holds it: random bytes, but for the scales at the places given.
std::vector<uint8_t> file_weight(int32_t format, int rows, int columns) {
    constexpr int block_bytes[kFormats] = {4, 2, 2, 18, 20, 22, 24, 34, 144, 176, 210};
    const bool has_minimum = format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K;
    std::normal_distribution<float> normal;
    std::vector<uint8_t> bytes((size_t)rows * (columns / tile_columns(format)) * block_bytes[format]);
    for (uint8_t& byte : bytes) byte = (uint8_t)generator();
    for (size_t block = 0; block < bytes.size(); block += block_bytes[format]) {
        const float value = normal(generator);
        // Halves of any sign and of exponents about 2^-6, subnormal ones among them.
        const uint16_t scale[2] = {(uint16_t)(generator() & 0xa3ff), (uint16_t)((generator() & 0x83ff) | 0x2400)};
        if (format == F32) std::memcpy(&bytes[block], &value, 4);
        if (format == BF16) std::memcpy(&bytes[block], (const char*)&value + 2, 2);
        if (format == F16) std::memcpy(&bytes[block], scale, 2);
        if (is_quantised(format)) std::memcpy(&bytes[block + (format == Q6_K ? 208 : 0)], scale, has_minimum ? 4 : 2);
    }
    return bytes;
}

struct Packed {
    std::vector<uint8_t> data;
    Weight weight;
};
Packed packed(int32_t format, int rows, int columns) {
    Packed p;
    p.data.resize(packed_bytes(format, rows, columns));
    pack(format, rows, columns, file_weight(format, rows, columns).data(), p.data.data());
    p.weight = {format, rows, columns, 0, p.data.data(), nullptr};
    return p;
}

void linear() {
    constexpr int rows = 35;
    for (int32_t format = F32; format < kFormats; format++) {
        const int columns = is_quantised(format) ? 512 : 75, groups = columns / kGroup;
        const Packed matrix = packed(format, 37, columns);
        std::vector<float> x = numbers((size_t)rows * columns);
        std::vector<Record> records((size_t)(rows + 15) / 16 * groups);
        for (int r = 0; r < rows && is_quantised(format); r++)
            plain.quantise(&x[(size_t)r * columns], groups, &records[(size_t)(r / 16) * groups], r % 16);
        const Activations in = {records.data(), x.data(), columns};
        for (int tile = 0; tile < 3; tile++) {
            std::vector<float> expected(48 * 16), found(48 * 16);
            plain.linear_tile(matrix.weight, tile, in, 0, rows, expected.data());
            for (int first = 0; first < rows; first += 16) {
                for (int count = 1; first + count <= rows; count++) {
                    neon.linear_tile(matrix.weight, tile, in, first, count, found.data());
                    const float* same_rows = &expected[(size_t)first * 16];
                    expect_same(found.data(), same_rows, (size_t)count * 16, "linear_tile", format, count);
                }
            }
        }
    }
}

void dequantise() {
    for (int32_t format = F32; format < kFormats; format++) {
        const Packed matrix = packed(format, 37, 512);
        for (int row = 0; row < 37; row++)
            compare("dequantise_row", format, 512,
                    [&](const Kernels& k, float* out) { k.dequantise_row(matrix.weight, row, out); });
    }
}

void quantise() {
    constexpr int groups = 64;
    for (float scale : {0.0f, 1e-30f, 1.0f, 1e30f}) {
        std::vector<float> x = numbers(groups * kGroup, scale);
        for (int g = 0; g < groups; g += 2) x[g * kGroup] = 127.0f * scale;  // so that halves are halves
        for (int row = 0; row < kBlockRows; row++) {
            std::vector<Record> found(groups), expected(groups);
            neon.quantise(x.data(), groups, found.data(), row), plain.quantise(x.data(), groups, expected.data(), row);
            expect_same(found.data(), expected.data(), groups, "quantise", row);
        }
    }
}

void rows() {
    for (int n : {16, 32, 75, 576}) {
        const std::vector<float> x = numbers(n), y = numbers(n), angles = numbers(n);
        auto in_place = [&](float* out) { std::memcpy(out, x.data(), sizeof(float) * n); };
        compare("rms_norm", n, n, [&](const Kernels& k, float* out) { k.rms_norm(x.data(), y.data(), 1e-6f, n, out); });
        compare("add", n, n, [&](const Kernels& k, float* out) { in_place(out), k.add(out, y.data(), n); });
        compare("rotate", n, n, [&](const Kernels& k, float* out) {
            in_place(out), k.rotate(out, y.data(), angles.data(), n / 2 * 2);
        });
    }
    const std::vector<float> tile = numbers(5 * 16), other = numbers(5 * 16), before = numbers(5 * 20);
    for (int32_t activation : {0, 1})
        compare("gate", activation, 5 * 20, [&](const Kernels& k, float* out) {
            k.gate(tile.data(), other.data(), 5, activation, out, 20);
        });
    for (int lanes = 1; lanes <= 16; lanes++)
        compare("add_tile", lanes, before.size(), [&](const Kernels& k, float* out) {
            std::memcpy(out, before.data(), sizeof(float) * before.size());
            k.add_tile(tile.data(), 5, lanes, out, 20);
        });
}

void write_kv() {
    constexpr int n = 1 << 16;
    std::vector<float> x(n);
    for (int i = 0; i < n; i++) {  // ties, infinities and NaN among them
        const uint32_t bits = (uint32_t)i << 16 | (i % 3 == 0 ? 0x8000 : generator() & 0xffff);
        std::memcpy(&x[i], &bits, 4);
    }
    for (KvDtype dtype : {kKvFloat32, kKvBfloat16, kKvFp8})
        compare("write_kv", dtype, n, [&](const Kernels& k, float* out) {
            float scale = 1.5f;
            k.write_kv(x.data(), n, dtype, out, &scale);
        });
    for (float size : {0.0f, 1e-30f, 1.0f, 1e30f}) {
        const std::vector<float> finite = numbers(64, size);
        compare("write_kv int8", size > 0, 64 / 4 + 1, [&](const Kernels& k, float* out) {
            k.write_kv(finite.data(), 64, kKvInt8, out, out + 64 / 4);
        });
    }
}

void attend() {
    constexpr int context = 300, slots = 320, count = 13, kv_heads = 2;
    for (int head_dim : {16, 48, 128}) {
        for (KvDtype dtype : {kKvFloat32, kKvBfloat16, kKvFp8, kKvInt8}) {
            const size_t head_bytes = head_dim * kv_bytes(dtype), slot_bytes = kv_heads * head_bytes;
            const size_t row = attention_row(head_dim);
            const int pool = slots * kv_heads * head_dim;
            const std::vector<float> keys = numbers(pool, 0.3f), values = numbers(pool);
            const std::vector<float> query = numbers((size_t)count * head_dim);
            std::vector<char> key(slots * slot_bytes), value(slots * slot_bytes);
            std::vector<float> key_scales(slots * kv_heads, 0.01f), value_scales(slots * kv_heads, 0.02f);
            for (int i = 0; i < slots * kv_heads; i++) {
                plain.write_kv(&keys[i * head_dim], head_dim, dtype, &key[i * head_bytes], &key_scales[i]);
                plain.write_kv(&values[i * head_dim], head_dim, dtype, &value[i * head_bytes], &value_scales[i]);
            }
            std::vector<int32_t> table(slots);
            for (int i = 0; i < slots; i++) table[i] = i * 7 % slots;  // each slot once, in no order
            std::vector<float> scratch(attention_scratch(head_dim));

            auto run = [&](const Kernels& k, int window, int first, int queries, float* out) {
                AttentionItem item = {};
                for (int q = 0; q < queries; q++) {
                    item.query[q] = &query[(size_t)(first + q) * head_dim];
                    item.last[q] = context - count + first + q + 1;
                    item.first[q] = item.last[q] > window ? item.last[q] - window : 0;
                }
                item.count = queries, item.head_dim = head_dim, item.scale = 0.2f, item.dtype = dtype;
                item.slots = table.data(), item.context = context, item.slot_stride = slot_bytes;
                item.key = key.data() + head_bytes, item.value = value.data() + head_bytes;
                item.key_scale = &key_scales[1], item.value_scale = &value_scales[1], item.scale_stride = kv_heads;
                std::vector<float> maxima(kQueryBlock, -INFINITY), sums(kQueryBlock * row, 0.0f);
                std::vector<float> late_maxima = maxima, late_sums = sums;
                k.attend(item, 0, 2, maxima.data(), sums.data(), scratch.data());
                k.attend(item, 2, 3, late_maxima.data(), late_sums.data(), scratch.data());
                k.merge(queries, maxima.data(), sums.data(), late_maxima.data(), late_sums.data(), head_dim);
                for (int q = 0; q < queries; q++) k.finish(&sums[q * row], head_dim, out + (size_t)q * head_dim);
            };
            std::vector<float> expected(count * head_dim), found(count * head_dim);
            for (int window : {context, 99}) {
                run(plain, window, 0, count, expected.data());
                for (int first = 0; first < count; first++) {
                    for (int queries : {1, count - first}) {
                        run(neon, window, first, queries, found.data());
                        const float* same_rows = &expected[(size_t)first * head_dim];
                        expect_same(found.data(), same_rows, (size_t)queries * head_dim, "attend", head_dim, first);
                    }
                }
            }
        }
    }
}

void state() {
    constexpr int count = 5, key_dim = 19;
    for (int lanes : {7, 16, 40, kStateColumns}) {
        const std::vector<float> keys = numbers(count * key_dim, 0.3f), values = numbers(count * kStateColumns);
        const std::vector<float> before = numbers(key_dim * kStateColumns);
        for (bool delta_rule : {false, true}) {
            const size_t outputs = (size_t)count * lanes;
            compare("recur", lanes, outputs + before.size(), [&](const Kernels& k, float* out) {
                StateRow rows[count];
                for (int r = 0; r < count; r++) {
                    const float* key = &keys[r * key_dim];
                    rows[r] = {key, &values[r * kStateColumns], keys.data(), out + r * lanes, -0.2f * r, 0.1f * r};
                }
                std::memcpy(out + outputs, before.data(), sizeof(float) * before.size());
                k.recur(rows, count, key_dim, lanes, delta_rule, out + outputs);
            });
        }
    }
    const std::vector<float> inputs = numbers(4 * 50), weight = numbers(4 * 50), bias = numbers(50);
    const float* taps[] = {&inputs[0], &inputs[50], &inputs[150]};
    for (const float* added : {bias.data(), (const float*)nullptr})
        compare("convolve", added != nullptr, 50, [&](const Kernels& k, float* out) {
            k.convolve(taps, weight.data(), added, 3, 50, out);
        });
}

}  // namespace

int main(int, char** arguments) {
    const std::pair<const char*, void (*)()> cases[] = {
        {"linear", linear}, {"dequantise", dequantise}, {"quantise", quantise}, {"rows", rows},
        {"write_kv", write_kv}, {"attend", attend}, {"state", state}, {"isa", [] { std::puts(tandem_isa()); }},
    };
    for (const auto& [name, run] : cases)
        if (std::strcmp(name, arguments[1]) == 0) return run(), 0;
    return 2;
}
