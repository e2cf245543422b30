// All that the kernels know of the hardware. Each function has a device version (PTX) and a host version, so that g++
// builds and runs the same kernel source lane by lane (host_block.h) and tests compare it with the reference.
//
// Half and Bf16 name the type of a packed pair, which is a uint32_t: the even element in the low half.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#define TK_DEVICE __device__ __forceinline__
#else
#define TK_DEVICE inline
#include "host_block.h"
#endif

namespace tk {

struct Half {};
struct Bf16 {};
struct alignas(16) Words4 {
    uint32_t w[4];
};
struct alignas(8) Words2 {
    uint32_t w[2];
};
struct alignas(16) Float4 {
    float f[4];
};

constexpr int WARP = 32;

// --- position -------------------------------------------------------------------------------------------------------

#ifdef __CUDACC__
TK_DEVICE int thread_index() { return threadIdx.x; }
TK_DEVICE int block_x() { return blockIdx.x; }
TK_DEVICE int block_y() { return blockIdx.y; }
TK_DEVICE int block_z() { return blockIdx.z; }
TK_DEVICE int grid_x() { return gridDim.x; }
TK_DEVICE int grid_z() { return gridDim.z; }
#else
TK_DEVICE int thread_index() { return host::block()->current; }
TK_DEVICE int block_x() { return host::block()->x; }
TK_DEVICE int block_y() { return host::block()->y; }
TK_DEVICE int block_z() { return host::block()->z; }
TK_DEVICE int grid_x() { return host::block()->grid_x; }
TK_DEVICE int grid_z() { return host::block()->grid_z; }
#endif

// --- numbers --------------------------------------------------------------------------------------------------------

TK_DEVICE float float_of_bits(uint32_t bits) {
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
#endif
}

TK_DEVICE uint32_t bits_of_float(float f) {
#ifdef __CUDACC__
    return __float_as_uint(f);
#else
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
#endif
}

// One 16-bit number (in the low half) as float.
template <class T>
TK_DEVICE float widen(uint32_t bits);
template <>
TK_DEVICE float widen<Bf16>(uint32_t bits) {
    return float_of_bits(bits << 16);
}
template <>
TK_DEVICE float widen<Half>(uint32_t bits) {
#ifdef __CUDACC__
    float f;
    asm("{.reg .b16 h, z; mov.b32 {h, z}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits));
    return f;
#else
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float f = exponent == 31 ? (fraction ? NAN : INFINITY)
              : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                             : std::ldexp(float(fraction), -24);
    return bits & 0x8000 ? -f : f;
#endif
}

struct alignas(8) Pair {
    float first, second;
};

// A pair as floats.
template <class T>
TK_DEVICE Pair widen_pair(uint32_t bits) {
#ifdef __CUDACC__
    if constexpr (std::is_same_v<T, Half>) {
        Pair f;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
            : "=f"(f.first), "=f"(f.second)
            : "r"(bits));
        return f;
    } else {
        return {float_of_bits(bits << 16), float_of_bits(bits & 0xffff0000)};
    }
#else
    return {widen<T>(bits & 0xffff), widen<T>(bits >> 16)};
#endif
}

#ifndef __CUDACC__
namespace host {
inline uint32_t bits_of(Bf16, double value) {
    return std::isnan(value) ? 0x7fff : bits_of_float(float(round_to(value, 7, -126, 3.4e38))) >> 16;
}
inline uint32_t bits_of(Half, double value) {
    if (std::isnan(value)) return 0x7fff;
    const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
    const double v = std::fabs(round_to(value, 10, -14, 65504));
    if (std::isinf(v)) return sign | 0x7c00;
    if (v < std::ldexp(1, -14)) return sign | uint32_t(std::ldexp(v, 24));
    const int exponent = std::ilogb(v);
    return sign | uint32_t((exponent + 15) << 10) | (uint32_t(std::ldexp(v, 10 - exponent)) & 1023);
}
}  // namespace host
#endif

// Two floats rounded to a pair.
template <class T>
TK_DEVICE uint32_t to_pair(float even, float odd) {
#ifdef __CUDACC__
    uint32_t pair;
    if constexpr (std::is_same_v<T, Half>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    return pair;
#else
    return host::bits_of(T{}, even) | host::bits_of(T{}, odd) << 16;
#endif
}

// a·b + c on pairs, rounded once. With c = -0 it is a product.
template <class T>
TK_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDACC__
    uint32_t d;
    if constexpr (std::is_same_v<T, Half>)
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    auto one = [&](int shift) {
        auto part = [&](uint32_t v) { return double(widen<T>(v >> shift & 0xffff)); };
        return host::bits_of(T{}, part(a) * part(b) + part(c)) << shift;
    };
    return one(0) | one(16);
#endif
}
constexpr uint32_t NOTHING = 0x80008000;  // a pair of -0

// --- bits -----------------------------------------------------------------------------------------------------------

// (word & mask) | bits, in one instruction.
template <uint32_t MASK, uint32_t BITS>
TK_DEVICE uint32_t and_or(uint32_t word) {
#ifdef __CUDACC__
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "n"(MASK), "n"(BITS));
    return d;
#else
    return (word & MASK) | BITS;
#endif
}

// Four bytes chosen from a (0-3) and b (4-7); the selector's lowest nibble chooses the lowest byte.
TK_DEVICE uint32_t choose_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDACC__
    return __byte_perm(a, b, selector);
#else
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t d = 0;
    for (int i = 0; i < 4; ++i) d |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return d;
#endif
}

// --- tensor cores ---------------------------------------------------------------------------------------------------

// d += a·b: 16 x 16 by 16 x 8. Of lane 4g + t: a[0], a[2] are row g at columns 2t, 2t + 8, a[1], a[3] row g + 8;
// b[0], b[1] column g at rows 2t, 2t + 8; d[0], d[1] row g at columns 2t, 2t + 1, d[2], d[3] row g + 8.
template <class T>
TK_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef __CUDACC__
    if constexpr (std::is_same_v<T, Half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    host::Block& block = *host::block();
    host::WarpState& warp = block.warps[block.current / WARP];
    const int lane = block.current % WARP;
    for (int i = 0; i < 4; ++i) warp.a[lane][i] = a[i], warp.d[lane][i] = d[i];
    warp.b[lane][0] = b0, warp.b[lane][1] = b1;
    block.meet(warp.meeting, [&] {
        float left[16][16], right[16][8];
        for (int l = 0; l < WARP; ++l) {
            const int g = l / 4, t = l % 4;
            for (int i = 0; i < 4; ++i)
                for (int e = 0; e < 2; ++e)
                    left[g + i % 2 * 8][2 * t + i / 2 * 8 + e] = widen<T>(warp.a[l][i] >> 16 * e & 0xffff);
            for (int i = 0; i < 2; ++i)
                for (int e = 0; e < 2; ++e) right[2 * t + 8 * i + e][g] = widen<T>(warp.b[l][i] >> 16 * e & 0xffff);
        }
        for (int l = 0; l < WARP; ++l)
            for (int i = 0; i < 4; ++i) {
                double sum = warp.d[l][i];
                for (int k = 0; k < 16; ++k)
                    sum += double(left[l / 4 + i / 2 * 8][k]) * right[k][l % 4 * 2 + i % 2];
                warp.d[l][i] = float(sum);
            }
    });
    for (int i = 0; i < 4; ++i) d[i] = warp.d[lane][i];
#endif
}

// --- memory ---------------------------------------------------------------------------------------------------------

TK_DEVICE Words4 load_128(const void* global) {
#ifdef __CUDACC__
    Words4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(global));
    return v;
#else
    host::block()->touch(global, 16);
    return *static_cast<const Words4*>(global);
#endif
}

TK_DEVICE void store_128(void* global, const Words4& v) {
#ifdef __CUDACC__
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(global), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3]));
#else
    host::block()->touch(global, 16);
    *static_cast<Words4*>(global) = v;
#endif
}

// Starts a copy of BYTES (4, 8 or 16, aligned) into shared memory. KEEP: through the first-level cache, for what
// neighbours read too.
template <int BYTES, bool KEEP = false>
TK_DEVICE void copy_async(void* shared, const void* global) {
#ifdef __CUDACC__
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16 && !KEEP)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES) : "memory");
#else
    host::block()->touch(global, BYTES);
    host::block()->lane().pending.push_back({shared, global, BYTES});
#endif
}

// Ends a group of copies.
TK_DEVICE void commit_copies() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    auto& lane = host::block()->lane();
    lane.groups.push_back(std::move(lane.pending));
    lane.pending.clear();
#endif
}

// Waits until at most the LEFT newest groups of this thread are under way.
template <int LEFT>
TK_DEVICE void wait_copies() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#else
    auto& lane = host::block()->lane();
    for (; lane.groups.size() > LEFT; lane.groups.pop_front())
        for (const auto& copy : lane.groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
#endif
}

// --- order ----------------------------------------------------------------------------------------------------------

TK_DEVICE void barrier() {
#ifdef __CUDACC__
    __syncthreads();
#else
    host::block()->meet(host::block()->barrier, [] {});
#endif
}

// Machine code is not reordered across it. Before compute capability 9.0 it would be a call, and is not needed.
TK_DEVICE void keep_order() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __syncwarp();
#endif
}

// Counts an arrival; what this thread wrote before is seen by those who count later. Returns the count before.
TK_DEVICE int arrive(int* counter) {
#ifdef __CUDACC__
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
#else
    host::block()->touch(counter, sizeof *counter);
    return (*counter)++;
#endif
}

TK_DEVICE void fence() {
#ifdef __CUDACC__
    __threadfence();
#endif
}

// Programmatic dependent launch: waits for the kernel before this one; on older GPUs the launch has waited.
TK_DEVICE void wait_for_predecessor() {
#ifndef __CUDACC__
    host::block()->lane().waited = true;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start its own loads of weights.
TK_DEVICE void release_successor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tk
