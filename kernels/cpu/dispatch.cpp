// Which instruction set runs: the best this processor has, or the one asked for by name. TK_HAVE_<name> says for which
// ones this library was built (toolkit/runners/native/build.py).
#include "ops.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tk {

#define TK_DECLARE(isa)         \
    namespace isa {             \
    extern const Ops table;     \
    }
namespace amx {
const Ops* table();
}
TK_DECLARE(avx512vnni)
TK_DECLARE(avxvnni)
TK_DECLARE(avx2)
TK_DECLARE(i8mm)
TK_DECLARE(dotprod)
TK_DECLARE(neon)
TK_DECLARE(generic)

namespace {

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

[[maybe_unused]] bool has_avxvnni() {  // g++ 12 knows no name for it: leaf 7, subleaf 1, EAX bit 4
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
}

[[maybe_unused]] bool has_avx512vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

[[maybe_unused]] bool has_amx() {  // leaf 7, EDX: 22 products of bfloat16, 24 tiles, 25 products of integers
    unsigned a = 0, b = 0, c = 0, d = 0, kept = 0, high = 0;
    if (!has_avx512vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3 || !(d >> 22 & 1)) return false;
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));  // what the system keeps of a thread: 17 their shape, 18 their data
    return (kept >> 17 & 3) == 3;
}

// Linux keeps the registers' 8 KB of a thread only for processes that ask, all threads of theirs then.
[[maybe_unused]] bool may_use_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#elif defined(__aarch64__)
[[maybe_unused]] bool has_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

[[maybe_unused]] bool has_i8mm() {
    const unsigned long wanted = HWCAP2_I8MM | HWCAP2_BF16;
    return has_dotprod() && (getauxval(AT_HWCAP2) & wanted) == wanted;
}
#endif

[[maybe_unused]] bool always() { return true; }

bool made_by_amd() {
#if defined(__x86_64__)
    unsigned most = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(0, &most, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
#else
    return false;
#endif
}

template <const Ops& TABLE>
const Ops* constant() { return &TABLE; }

struct Entry {
    const char* name;
    const Ops* (*table)();
    bool (*supported)();
    bool (*allowed)() = always;
};

const Entry ENTRIES[] = {
#if defined(TK_HAVE_amx)
    {"amx", amx::table, has_amx, may_use_tiles},
#endif
#if defined(TK_HAVE_avx512vnni)
    {"avx512vnni", constant<avx512vnni::table>, has_avx512vnni},
#endif
#if defined(TK_HAVE_avxvnni)
    {"avxvnni", constant<avxvnni::table>, has_avxvnni},
#endif
#if defined(TK_HAVE_avx2)
    {"avx2", constant<avx2::table>, has_avx2},
#endif
#if defined(TK_HAVE_i8mm)
    {"i8mm", constant<i8mm::table>, has_i8mm},
#endif
#if defined(TK_HAVE_dotprod)
    {"dotprod", constant<dotprod::table>, has_dotprod},
#endif
#if defined(TK_HAVE_neon)
    {"neon", constant<neon::table>, always},
#endif
#if defined(TK_HAVE_generic)
    {"generic", constant<generic::table>, always},
#endif
};

}  // namespace

const Ops* select_ops(const char* name, const char** reason) {
    *reason = "no such instruction set in this build";
    for (const Entry& e : ENTRIES) {
        if (name && *name && std::strcmp(name, e.name) != 0) continue;
        const bool here = e.supported();
        if (here && e.allowed()) return e.table();
        *reason = here ? "the system does not keep its registers for this process" : "this processor lacks it";
    }
    return nullptr;
}

bool few_places() {
    static const bool few = made_by_amd();
    return few;
}

}  // namespace tk
