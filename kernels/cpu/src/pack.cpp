// From a GGUF file's blocks to the tiles of formats.h, without loss. Plain scalar code: it runs once, at load.
#include <cstring>

#include "kernels.h"
#include "pack.h"

namespace {

struct Shape {
    int columns, groups, line_bytes, block_bytes, tail_bytes;  // of a tile; block_bytes is the file's, a row
    int bits, offset;
};

Shape shape_of(int32_t format) {
    switch (format) {
        case F32: return {1, 0, 0, 4, 64, 32, 0};
        case BF16: return {1, 0, 0, 2, 32, 16, 0};
        case F16: return {1, 0, 0, 2, 32, 16, 0};
        case Q4_0: return {32, 1, 256, 18, 32, 4, 8};
        case Q4_1: return {32, 1, 256, 20, 64, 4, 0};
        case Q5_0: return {32, 1, 320, 22, 32, 5, 16};
        case Q5_1: return {32, 1, 320, 24, 64, 5, 0};
        case Q8_0: return {32, 1, 512, 34, 32, 8, 128};
        case Q4_K: return {256, 8, 256, 144, 64 + 256, 4, 0};
        case Q5_K: return {256, 8, 320, 176, 64 + 256, 5, 0};
        case Q6_K: return {256, 8, 384, 210, 32 + 256, 6, 32};
    }
    return {};
}

// One row's block of the file: unsigned values, scales as the tile holds them.
struct Block {
    uint8_t values[256];
    uint16_t d, minimum;
    uint8_t scales[16], minima[8];
};

void split_k_scales(const uint8_t* packed, Block& b) {  // 6 bits each, 8 scales and 8 minima in 12 bytes
    for (int j = 0; j < 8; j++) {
        if (j < 4) {
            b.scales[j] = packed[j] & 63;
            b.minima[j] = packed[j + 4] & 63;
        } else {
            b.scales[j] = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
            b.minima[j] = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
        }
    }
}

void read_block(int32_t format, const uint8_t* p, Block& b) {
    auto half = [&](int at) {
        uint16_t h;
        std::memcpy(&h, p + at, 2);
        return h;
    };
    switch (format) {
        case Q4_0:
        case Q4_1:
        case Q5_0:
        case Q5_1: {
            const bool has_minimum = format == Q4_1 || format == Q5_1, five = format == Q5_0 || format == Q5_1;
            int at = has_minimum ? 4 : 2;
            b.d = half(0);
            if (has_minimum) b.minimum = half(2);
            uint32_t high = 0;
            if (five) std::memcpy(&high, p + at, 4), at += 4;
            for (int i = 0; i < 16; i++) {
                b.values[i] = (p[at + i] & 15) | (((high >> i) & 1) << 4);
                b.values[i + 16] = (p[at + i] >> 4) | (((high >> (i + 16)) & 1) << 4);
            }
            return;
        }
        case Q8_0:
            b.d = half(0);
            for (int i = 0; i < 32; i++) b.values[i] = p[2 + i] ^ 0x80;
            return;
        case Q4_K:
        case Q5_K: {
            b.d = half(0), b.minimum = half(2);
            split_k_scales(p + 4, b);
            const uint8_t *high = p + 16, *low = p + (format == Q5_K ? 48 : 16);
            for (int i = 0; i < 256; i++) {
                const int pair = i / 64, upper = (i / 32) % 2, byte = i % 32;
                b.values[i] = (low[32 * pair + byte] >> (4 * upper)) & 15;
                if (format == Q5_K) b.values[i] |= ((high[byte] >> (2 * pair + upper)) & 1) << 4;
            }
            return;
        }
        case Q6_K:
            for (int i = 0; i < 256; i++) {
                const int part = i / 128, quarter = (i % 128) / 32, byte = i % 32;
                const uint8_t low = p[64 * part + 32 * (quarter % 2) + byte], high = p[128 + 32 * part + byte];
                b.values[i] = ((low >> (4 * (quarter / 2))) & 15) | (((high >> (2 * quarter)) & 3) << 4);
            }
            std::memcpy(b.scales, p + 192, 16);
            b.d = half(208);
            return;
    }
}

// One row's 32 values into the lines of a group, 4 columns at a time.
void write_group(uint8_t* lines, int bits, int lane, const uint8_t* values) {
    uint32_t v[8], high[2] = {0, 0};
    std::memcpy(v, values, 32);
    auto put = [&](int line, uint32_t bytes) { std::memcpy(lines + 64 * line + 4 * lane, &bytes, 4); };
    if (bits == 8) {
        for (int line = 0; line < 8; line++) put(line, v[line]);
        return;
    }
    for (int line = 0; line < 4; line++) put(line, (v[line] & 0x0f0f0f0f) | ((v[line + 4] & 0x0f0f0f0f) << 4));
    for (int line = 0; line < 8; line++) {
        const uint32_t rest = (v[line] >> 4) & (bits == 5 ? 0x01010101 : 0x03030303);
        if (bits == 5) high[0] |= rest << line;
        if (bits == 6) high[line / 4] |= rest << (2 * (line % 4));
    }
    for (int h = 0; h < bits - 4; h++) put(4 + h, high[h]);
}

void write_scales(uint8_t* tail, int32_t format, int lane, const Block& b) {
    std::memcpy(tail + 2 * lane, &b.d, 2);
    if (format == Q6_K) {
        for (int i = 0; i < 16; i++) tail[32 + 16 * i + lane] = b.scales[i];
    } else if (format == Q4_K || format == Q5_K) {
        std::memcpy(tail + 32 + 2 * lane, &b.minimum, 2);
        for (int i = 0; i < 8; i++) tail[64 + 16 * i + lane] = b.scales[i], tail[192 + 16 * i + lane] = b.minima[i];
    } else if (format == Q4_1 || format == Q5_1) {
        std::memcpy(tail + 32 + 2 * lane, &b.minimum, 2);
    }
}

}  // namespace

int tile_columns(int32_t format) { return shape_of(format).columns; }

size_t tile_bytes(int32_t format) {
    const Shape s = shape_of(format);
    return (size_t)s.groups * s.line_bytes + s.tail_bytes;
}

size_t packed_bytes(int32_t format, int rows, int columns) {
    return (size_t)((rows + 15) / 16) * (columns / tile_columns(format)) * tile_bytes(format);
}

void pack(int32_t format, int rows, int columns, const uint8_t* file, uint8_t* out) {
    const Shape s = shape_of(format);
    const int tiles = columns / s.columns;
    const size_t bytes = tile_bytes(format), row_bytes = (size_t)tiles * s.block_bytes;
    std::memset(out, 0, packed_bytes(format, rows, columns));
    for (int row = 0; row < rows; row++) {
        const uint8_t* from = file + (size_t)row * row_bytes;
        uint8_t* to = out + (size_t)(row / 16) * tiles * bytes;
        const int lane = row % 16;
        for (int t = 0; t < tiles; t++, from += s.block_bytes, to += bytes) {
            if (!is_quantised(format)) {
                std::memcpy(to + lane * s.block_bytes, from, s.block_bytes);
                continue;
            }
            Block block = {};
            read_block(format, from, block);
            for (int g = 0; g < s.groups; g++) write_group(to + g * s.line_bytes, s.bits, lane, block.values + 32 * g);
            write_scales(to + s.groups * s.line_bytes, format, lane, block);
        }
    }
}

void select_rows(int32_t format, int columns, const uint8_t* packed, const int64_t* rows, int count, uint8_t* out) {
    const Shape s = shape_of(format);
    const int tiles = columns / s.columns;
    const size_t bytes = tile_bytes(format);
    // A tile is lines of 16 lanes, one a row: dwords of values, then halves and bytes of scales.
    const int halves = s.offset == 0 ? 2 : 1;  // without an offset there is a minimum
    const int lines[] = {s.groups * s.line_bytes / 64, halves, (s.tail_bytes - 32 * halves) / 16};
    std::memset(out, 0, packed_bytes(format, count, columns));
    for (int i = 0; i < count; i++) {
        const uint8_t* from = packed + (size_t)(rows[i] / 16) * tiles * bytes;
        uint8_t* to = out + (size_t)(i / 16) * tiles * bytes;
        const int lane = (int)(rows[i] % 16), to_lane = i % 16;
        for (int t = 0; t < tiles; t++, from += bytes, to += bytes) {
            if (!is_quantised(format)) {
                std::memcpy(to + to_lane * s.block_bytes, from + lane * s.block_bytes, s.block_bytes);
                continue;
            }
            size_t line = 0;
            for (int kind = 0; kind < 3; kind++) {
                const int width = 4 >> kind;
                for (int l = 0; l < lines[kind]; l++, line += 16 * width)
                    std::memcpy(to + line + to_lane * width, from + line + lane * width, width);
            }
        }
    }
}
