// GELU of bf16 values by table. gelu.py holds the contract. The table covers magnitudes (a value's bits without the sign) from `low`
// up to `high`, positive values first; beyond it GELU is x/2, x or 0 exactly. Eight values a thread and step.

template <int SIZE>
__global__ void __launch_bounds__(256)
gelu(const uint4 *__restrict__ x, uint4 *__restrict__ out, const unsigned short *__restrict__ table, long long count, long long low) {
    __shared__ __align__(16) unsigned short values[2 * SIZE];
    for (int i = threadIdx.x; i < 2 * SIZE / 8; i += blockDim.x) ((uint4 *)values)[i] = ((const uint4 *)table)[i];
    __syncthreads();
    const unsigned first = (unsigned)low;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x) {
        const uint4 raw = __ldcs(x + i);
        unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            unsigned result = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned bits = (words[w] >> (16 * half)) & 0xffffu, magnitude = bits & 0x7fffu, sign = bits >> 15;
                const unsigned index = magnitude - first;
                unsigned y;
                if (index < SIZE) {
                    y = values[sign * SIZE + index];
                } else {
                    float value = __uint_as_float(bits << 16);
                    value = magnitude < first ? 0.5f * value : value > 0.0f ? value : value * 0.0f;
                    asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b32 %0, {h, 0};}" : "=r"(y) : "f"(value));
                }
                result |= y << (16 * half);
            }
            words[w] = result;
        }
        __stcs(out + i, make_uint4(words[0], words[1], words[2], words[3]));
    }
}
