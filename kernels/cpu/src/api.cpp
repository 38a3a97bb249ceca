// What Python calls: everything `tandem_*`, by plain pointers. Also picks the instruction set.
#include <cstring>

#include "pack.h"
#include "step.h"
#include "team.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(TANDEM_HAVE_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(TANDEM_HAVE_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#if defined(TANDEM_HAVE_X86)
bool amx_allowed() {  // Linux gives the tile registers to a process that asks for them
#if defined(__linux__)
    unsigned eax, ebx, ecx, edx;
    asm volatile("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(7), "c"(0));
    const bool has_tiles = (edx >> 22 & 1) && (edx >> 24 & 1) && (edx >> 25 & 1);  // bf16, tiles, int8
    constexpr long request_permission = 0x1023, tile_data = 18;
    return has_tiles && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#elif defined(TANDEM_HAVE_ARM)
bool has_dot_products() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    int32_t has = 0;
    size_t size = sizeof(has);
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#else
    return false;
#endif
}
#endif

// The best of what was built and this processor has; with a name, that one if it is among them, else null.
const Kernels* choose(const char* wanted) {
    auto is_wanted = [&](const char* name) { return wanted == nullptr || std::strcmp(wanted, name) == 0; };
#if defined(TANDEM_HAVE_X86)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (is_wanted("amx") && bf16 && amx_allowed()) return &kernels_amx;
    if (is_wanted("avx512_bf16") && bf16) return &kernels_avx512_bf16;
    if (is_wanted("avx512") && avx512) return &kernels_avx512;
    if (is_wanted("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernels_avx2;
#elif defined(TANDEM_HAVE_ARM)
    if (is_wanted("neon") && has_dot_products()) return &kernels_neon;
#endif
    return is_wanted("scalar") ? &kernels_scalar : nullptr;
}

const Kernels*& current() {
    static const Kernels* chosen = choose(nullptr);
    return chosen;
}

}  // namespace

const Kernels& kernels() { return *current(); }

// Returns whether this processor has the kernels named. Not while a pass runs.
EXPORT int32_t tandem_set_isa(const char* name) {
    const Kernels* chosen = choose(name);
    if (chosen != nullptr) current() = chosen;
    return chosen != nullptr;
}
EXPORT const char* tandem_sources() { return TANDEM_SOURCES; }
EXPORT const char* tandem_isa() { return kernels().name; }
EXPORT int32_t tandem_team_size() { return team_size(); }
EXPORT void tandem_set_team_size(int32_t threads) { set_team_size(threads); }

// Has memory that has not been touched yet come in pages of 2 MB where it can: what a step reads once is read twice as
// fast as from pages of 4 KB, each of which the processor must look up.
EXPORT void tandem_use_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
    const uintptr_t first = ((uintptr_t)memory + 4095) & ~(uintptr_t)4095, last = (uintptr_t)memory + bytes;
    if (last > first) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

EXPORT int64_t tandem_packed_bytes(int32_t format, int32_t rows, int32_t columns) {
    return (int64_t)packed_bytes(format, rows, columns);
}
EXPORT void tandem_pack(int32_t format, int32_t rows, int32_t columns, const uint8_t* file, uint8_t* out) {
    pack(format, rows, columns, file, out);
}
EXPORT int32_t tandem_dequantise_rows(const Weight* weight, const int64_t* rows, int32_t count, float* out) {
    for (int32_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= weight->rows) return kBadToken;
    for (int32_t i = 0; i < count; i++)
        kernels().dequantise_row(*weight, (int)rows[i], out + (size_t)i * weight->columns);
    return kDone;
}
EXPORT int32_t tandem_select_rows(const Weight* weight, const int64_t* rows, int32_t count, uint8_t* out) {
    for (int32_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= weight->rows) return kBadToken;
    select_rows(weight->format, weight->columns, weight->data, rows, count, out);
    return kDone;
}
EXPORT int32_t tandem_linear(const Weight* weight, const float* x, int32_t rows, float* out) {
    return run_linear(*weight, x, rows, out);
}
EXPORT int32_t tandem_linear_by_expert(const Weight* first, int64_t stride, const int32_t* counts, int32_t experts,
                                       const float* x, float* out) {
    return run_linear_by_expert(*first, stride, counts, experts, x, out);
}
EXPORT int32_t tandem_step(const Model* model, const Batch* batch) { return run_step(*model, *batch); }
EXPORT int32_t tandem_context(const ContextModel* model, const ContextRows* rows) { return run_context(*model, *rows); }
EXPORT int32_t tandem_attention(const LayerAttentionCall* call) { return run_attention(*call); }
EXPORT int32_t tandem_recur(const RecurrenceCall* call) { return run_recurrence(*call); }
EXPORT int32_t tandem_convolve(const ConvolutionCall* call) { return run_convolution(*call); }
