// What the CUDA C++ kernels share: four elements of a row at a time, in the tensor's dtype (Raw) or as floats (Quad). cuda.py puts this
// file before each kernel. No CUDA header is included, so that NVRTC needs no toolkit.

enum { BF16, FP16, FP32 };

struct Quad { float v[4]; };

template <int DTYPE> struct Dtype;

template <> struct Dtype<BF16> {
    typedef uint2 Raw;
    static __device__ Quad unpack(Raw raw) {
        return {{__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                 __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u)}};
    }
    static __device__ Raw pack(Quad q) {
        Raw raw;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw.x) : "f"(q.v[1]), "f"(q.v[0]));
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw.y) : "f"(q.v[3]), "f"(q.v[2]));
        return raw;
    }
};

template <> struct Dtype<FP16> {
    typedef uint2 Raw;
    static __device__ void halves(unsigned pair, float &low, float &high) {
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(pair));
    }
    static __device__ Quad unpack(Raw raw) {
        Quad q;
        halves(raw.x, q.v[0], q.v[1]);
        halves(raw.y, q.v[2], q.v[3]);
        return q;
    }
    static __device__ Raw pack(Quad q) {
        Raw raw;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(raw.x) : "f"(q.v[1]), "f"(q.v[0]));
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(raw.y) : "f"(q.v[3]), "f"(q.v[2]));
        return raw;
    }
};

template <> struct Dtype<FP32> {
    typedef float4 Raw;
    static __device__ Quad unpack(Raw raw) { return {{raw.x, raw.y, raw.z, raw.w}}; }
    static __device__ Raw pack(Quad q) { return make_float4(q.v[0], q.v[1], q.v[2], q.v[3]); }
};

// Between two uses of a row that is kept in registers: without this the compiler unpacks it once and keeps the floats, twice the
// registers for 16-bit dtypes, and half as many rows fit on a multiprocessor. `zero` must be a zero that it cannot see through.
__device__ void stay_packed(uint2 &raw, unsigned zero) {
    raw.x ^= zero;
    raw.y ^= zero;
}
__device__ void stay_packed(float4 &, unsigned) {}

template <int DTYPE> __device__ Quad rounded(Quad q) { return Dtype<DTYPE>::unpack(Dtype<DTYPE>::pack(q)); }

// Quad number `index` of a row of the dtype. What is loaded is never written by the same kernel, so stores need not be waited for.
template <int DTYPE> __device__ typename Dtype<DTYPE>::Raw load(const void *row, long long index) {
    return __ldg((const typename Dtype<DTYPE>::Raw *)row + index);
}

template <int DTYPE> __device__ void store(void *row, long long index, Quad q) {
    ((typename Dtype<DTYPE>::Raw *)row)[index] = Dtype<DTYPE>::pack(q);
}

// Where a row starts, `offset` elements after a tensor's first.
template <int DTYPE> __device__ const void *at(const void *tensor, long long offset) {
    return (const char *)tensor + offset * (DTYPE == FP32 ? 4 : 2);
}
template <int DTYPE> __device__ void *at(void *tensor, long long offset) {
    return (char *)tensor + offset * (DTYPE == FP32 ? 4 : 2);
}
