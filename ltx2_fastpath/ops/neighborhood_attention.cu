// 3-D neighbourhood attention on tensor cores. neighborhood_attention.py holds the contract.
//
// A block owns a tile of queries of one head. A warp owns a brick of it: TILES times 2×2×4 queries (T, H, W), one after the other along T,
// each the 16 rows of an mma. The tile's halo streams through a ring in shared memory, plane by plane along T, CHUNK rows of H at a time;
// the warps take turns at copying chunks ahead, and may run half a ring apart: each multiplies the key rows that its own brick sees and
// passes over the rest. For a window of 11×11×11 a brick's 16 queries meet 12×12 rows of 16 keys: 1.73 for each key that counts.
// (A warp that only copies would cost the others a third of their registers.)

// ---- PTX -------------------------------------------------------------------------------------------------------------------------------
__device__ unsigned shared_address(const void *pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

__device__ void barrier_init(unsigned barrier, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ void barrier_arrive(unsigned barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
// Arrives when this thread's copies until now have.
__device__ void barrier_arrive_copied(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
        asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
    } while (!done);
}
// 16 bytes; zeros where there is nothing to copy.
__device__ void copy_piece(unsigned to, const void *from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
__device__ void load_matrices(unsigned (&to)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
__device__ void load_transposed(unsigned (&to)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
template <int DTYPE>
__device__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b_0, unsigned b_1, const float (&c)[4]) {
    if (DTYPE == BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
template <int DTYPE> __device__ unsigned packed(float low, float high) {
    unsigned pair;
    if (DTYPE == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
__device__ float from_lane_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
__device__ float infinity() { return __uint_as_float(0x7f800000u); }
extern __shared__ __align__(1024) unsigned char ring[];
// ---- end of PTX ------------------------------------------------------------------------------------------------------------------------

constexpr int HEAD_DIM = 64, ROW_BYTES = 2 * HEAD_DIM;
constexpr float LOG2_E = 1.4426950408889634f;
// A query's reference rises only where a score exceeds it by this much (base 2): probabilities reach 2^8, which fp16 holds.
constexpr float RISE = 8.0f;

// Where the window of position i begins on an axis of n.
template <int WINDOW> __device__ int window_start(int i, int n) { return max(min(i - WINDOW / 2, n - WINDOW), 0); }

// A key is a row of 128 bytes, whose eight pieces of 16 are permuted by the address's bits 7 to 9, so that one piece of eight neighbouring
// rows lies in different banks.
__device__ unsigned swizzled(unsigned address) { return address ^ ((address >> 3) & 0x70); }

// What a warp keeps of its brick. Thread 4g+c of it holds rows g and g+8 of each tile: queries (t, h, w) = (0 and 1, g/4, g%4).
template <int TILES, int GROUPS> struct Brick {
    unsigned q[TILES][4][4];           // the queries, as the left operand: [tile][16 of the head's 64][register]
    float out[TILES][8][4];            // not yet divided by sum
    float reference[TILES][2];         // what exponents are relative to, times log2 e
    float sum[TILES][2];               // of the keys in this thread's columns
    float mask[TILES][GROUPS][4];      // of a key row in the present plane, by T and W: 0 for a key that is seen, else -inf
    int h_start;                       // where the window of this thread's queries begins, in rows of the halo
};

// Two key rows of the halo, h and h + 1, for the tiles FIRST to LAST of the brick. Scores start at the mask, so what is not seen is -inf.
template <int DTYPE, int KH, int PITCH, int TILES, int GROUPS, int FIRST, int LAST>
__device__ __forceinline__ void two_rows(Brick<TILES, GROUPS> &brick, unsigned k_address, unsigned v_address, int h) {
    constexpr int PAIRS = GROUPS;  // of groups of 8 keys: one of each row, or both of one row
    float s[TILES][2 * PAIRS][4];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        const unsigned address = swizzled(k_address + pair * PITCH * ROW_BYTES);
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            unsigned k[4];
            load_matrices(k, address ^ (part * 32));
#pragma unroll
            for (int tile = FIRST; tile <= LAST; ++tile) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = GROUPS == 2 ? pair : i, group = GROUPS == 2 ? i : 0;
                    float(&d)[4] = s[tile][2 * pair + i];
                    if (part == 0) {
                        const bool seen = (unsigned)(h + row - brick.h_start) < (unsigned)KH;
                        float c[4];
#pragma unroll
                        for (int e = 0; e < 4; ++e) c[e] = seen ? brick.mask[tile][group][e] : -infinity();
                        multiply<DTYPE>(d, brick.q[tile][part], k[2 * i], k[2 * i + 1], c);
                    } else {
                        multiply<DTYPE>(d, brick.q[tile][part], k[2 * i], k[2 * i + 1], d);
                    }
                }
            }
        }
    }

    float top[TILES][2];
    bool rises = false;
#pragma unroll
    for (int tile = FIRST; tile <= LAST; ++tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = fmaxf(s[tile][0][2 * r], s[tile][0][2 * r + 1]);
#pragma unroll
            for (int i = 1; i < 2 * PAIRS; ++i) most = fmaxf(most, fmaxf(s[tile][i][2 * r], s[tile][i][2 * r + 1]));
            top[tile][r] = most * LOG2_E;
            rises = rises || top[tile][r] > brick.reference[tile][r] + RISE;
        }
    }
    if (any_lane(rises)) {
#pragma unroll
        for (int tile = FIRST; tile <= LAST; ++tile) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float most = top[tile][r];
                most = fmaxf(most, from_lane_xor(most, 1));
                most = fmaxf(most, from_lane_xor(most, 2));
                // Each query decides for itself: who its neighbours in the warp are must not show in its bits.
                const float reference = brick.reference[tile][r];
                const float now = most > reference + RISE ? most : reference;
                const float factor = power_of_two(reference - now);
                brick.reference[tile][r] = now;
                brick.sum[tile][r] *= factor;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    brick.out[tile][i][2 * r] *= factor;
                    brick.out[tile][i][2 * r + 1] *= factor;
                }
            }
        }
    }

    unsigned p[TILES][PAIRS][4];
#pragma unroll
    for (int tile = FIRST; tile <= LAST; ++tile) {
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float p_0 = power_of_two(fmaf(s[tile][i][2 * r], LOG2_E, -brick.reference[tile][r]));
                const float p_1 = power_of_two(fmaf(s[tile][i][2 * r + 1], LOG2_E, -brick.reference[tile][r]));
                brick.sum[tile][r] += p_0 + p_1;
                p[tile][i / 2][2 * (i % 2) + r] = packed<DTYPE>(p_0, p_1);
            }
        }
    }
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        const unsigned address = swizzled(v_address + pair * PITCH * ROW_BYTES);
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            unsigned v[4];
            load_transposed(v, address ^ (part * 32));
#pragma unroll
            for (int tile = FIRST; tile <= LAST; ++tile) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float(&d)[4] = brick.out[tile][2 * part + i];
                    multiply<DTYPE>(d, p[tile][pair], v[2 * i], v[2 * i + 1], d);
                }
            }
        }
    }
}

// Where a tile lies: its first query, its head and batch row, and the halo: the first key that it sees, and the end of it along T.
struct Place {
    int t, h, w, halo_t, halo_h, halo_w, halo_end;
    long long head, batch;
};

// KT, KH, KW: the window. TILES: mma tiles of a brick, along T. BRICKS_…: warps along each axis. CHUNK: key rows of H that are copied at
// once. SLOTS: chunks in the ring. BLOCKS: on a multiprocessor.
// The grid has T planes. q and out hold `frames` of them from t_begin on, k and v as many as these see, from key_begin on. Strides count
// elements.
template <int DTYPE, int KT, int KH, int KW, int TILES, int BRICKS_T, int BRICKS_H, int BRICKS_W, int CHUNK, int SLOTS, int BLOCKS>
__global__ void __launch_bounds__(32 * BRICKS_T * BRICKS_H * BRICKS_W, BLOCKS)
neighborhood_attention(const void *q, const void *k, const void *v, void *out, long long batch, long long T, long long H, long long W,
                       long long heads, long long frames, long long t_begin, long long key_begin,
                       long long q_batch, long long q_t, long long q_h, long long q_w, long long q_head,
                       long long k_batch, long long k_t, long long k_h, long long k_w, long long k_head,
                       long long v_batch, long long v_t, long long v_h, long long v_w, long long v_head) {
    constexpr int WARPS = BRICKS_T * BRICKS_H * BRICKS_W, AHEAD = SLOTS / 2;
    constexpr int BRICK_T = 2 * TILES, TILE_T = BRICK_T * BRICKS_T, TILE_H = 2 * BRICKS_H, TILE_W = 4 * BRICKS_W;
    constexpr int GROUPS = (3 + KW + 7) / 8;  // of 8 keys along W that four neighbours see
    constexpr int ROWS = TILE_H + KH - 1;     // of the halo, an even number
    constexpr int PITCH = TILE_W + KW - 1 > 8 * GROUPS ? TILE_W + KW - 1 : 8 * GROUPS;
    constexpr unsigned CHUNK_BYTES = CHUNK * PITCH * ROW_BYTES;  // of keys; as many of values follow
    static_assert(TILES <= 2 && GROUPS <= 2, "windows along W up to 13");
    static_assert(KT % 2 && KH % 2 && KW % 2 && CHUNK % 2 == 0 && SLOTS >= 2, "windows are odd, chunks even");

    const unsigned ring_address = shared_address(ring);
    const unsigned full = ring_address + SLOTS * 2 * CHUNK_BYTES, empty = full + 8 * SLOTS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(full + 8 * i, 32);
            barrier_init(empty + 8 * i, WARPS);
        }
    }
    __syncthreads();

    const int n_t = T, n_h = H, n_w = W, t_last = (int)(t_begin + frames) - 1;
    const int tiles_w = (n_w + TILE_W - 1) / TILE_W, tiles_h = (n_h + TILE_H - 1) / TILE_H;
    const int tiles_t = ((int)frames + TILE_T - 1) / TILE_T;
    const int tiles = tiles_w * tiles_h * tiles_t * (int)(heads * batch);

    // Neighbours along W, then H, run at the same time, so that halos are found in the L2 cache.
    const auto place = [&](int tile) {
        Place here;
        here.w = tile % tiles_w * TILE_W;
        tile /= tiles_w;
        here.h = tile % tiles_h * TILE_H;
        tile /= tiles_h;
        here.t = tile % tiles_t * TILE_T + (int)t_begin;
        tile /= tiles_t;
        here.head = tile % (int)heads;
        here.batch = tile / (int)heads;
        here.halo_t = window_start<KT>(here.t, n_t);
        here.halo_h = window_start<KH>(here.h, n_h);
        here.halo_w = window_start<KW>(here.w, n_w);
        here.halo_end = window_start<KT>(min(here.t + TILE_T - 1, t_last), n_t) + KT;
        return here;
    };

    // The rows to copy next: their tile, plane and first row, and from where this lane copies the first of its keys in that plane's halo.
    // A lane takes one piece of 16 bytes of every fourth key.
    int next_tile = blockIdx.x, next_row = 0, next_t, next_end, next_h, next_w;
    const char *next_keys, *next_values;
    int turn = warp;  // chunks until it is this warp's turn
    const auto start = [&] {
        const Place here = place(next_tile);
        const long long t = here.halo_t - key_begin, h = here.halo_h, w = here.halo_w + lane / 8, head = here.head;
        next_t = here.halo_t, next_end = here.halo_end, next_h = here.halo_h, next_w = here.halo_w + lane / 8;
        next_keys = (const char *)k + 2 * (here.batch * k_batch + t * k_t + h * k_h + w * k_w + head * k_head + lane % 8 * 8);
        next_values = (const char *)v + 2 * (here.batch * v_batch + t * v_t + h * v_h + w * v_w + head * v_head + lane % 8 * 8);
    };
    start();
    const auto copy_next = [&](int slot, unsigned parity) {
        if (next_tile >= tiles) return;
        if (turn == 0) {
            const unsigned to = ring_address + slot * 2 * CHUNK_BYTES + lane * 16;
            const char *keys = next_keys + 2 * next_row * k_h, *values = next_values + 2 * next_row * v_h;
            barrier_wait(empty + 8 * slot, parity ^ 1);
#pragma unroll 1
            for (int row = 0; row < CHUNK; ++row) {
                const bool row_exists = next_h + next_row + row < n_h;
#pragma unroll
                for (int i = 0; i < PITCH; i += 4) {
                    if (i + 4 > PITCH && lane / 8 >= PITCH - i) break;
                    const bool exists = row_exists && next_w + i < n_w;
                    const unsigned there = to + (row * PITCH + i) * ROW_BYTES;
                    copy_piece(swizzled(there), keys + 2 * i * k_w, exists);
                    copy_piece(swizzled(there + CHUNK_BYTES), values + 2 * i * v_w, exists);
                }
                keys += 2 * k_h, values += 2 * v_h;
            }
            barrier_arrive_copied(full + 8 * slot);
            turn = WARPS;
        }
        --turn;
        if ((next_row += CHUNK) >= ROWS) {
            next_row = 0;
            next_keys += 2 * k_t, next_values += 2 * v_t;
            if (++next_t == next_end && (next_tile += gridDim.x) < tiles) start();
        }
    };
    for (int i = 0; i < AHEAD; ++i) copy_next(i, 0);

    int slot = 0;
    unsigned parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place here = place(tile);
        // The brick's queries. What lies outside of the grid computes its nearest neighbour's and is not stored.
        const int g = lane / 4, c = lane % 4;
        const int brick_w = here.w + warp % BRICKS_W * 4, brick_h = here.h + warp / BRICKS_W % BRICKS_H * 2;
        const int brick_t = here.t + warp / (BRICKS_W * BRICKS_H) * BRICK_T;
        const bool idle = brick_w >= n_w || brick_h >= n_h || brick_t > t_last;
        const int w = min(brick_w + g % 4, n_w - 1), h = min(brick_h + g / 4, n_h - 1);
        // 8 GROUPS keys along W that hold the windows of all four queries, in columns of the halo.
        const int column = min(window_start<KW>(min(brick_w, n_w - 1), n_w) - here.halo_w, PITCH - 8 * GROUPS);
        // Steps of two key rows that the brick sees.
        const int step_begin = (window_start<KH>(min(brick_h, n_h - 1), n_h) - here.halo_h) / 2;
        const int step_end = (window_start<KH>(min(brick_h + 1, n_h - 1), n_h) - here.halo_h + KH + 1) / 2;

        Brick<TILES, GROUPS> brick;
        brick.h_start = window_start<KH>(h, n_h) - here.halo_h;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                brick.reference[i][r] = -3.0e38f;
                brick.sum[i][r] = 0.0f;
                const long long t = min(brick_t + 2 * i + r, t_last) - t_begin;
                const unsigned *row = (const unsigned *)at<DTYPE>(q, here.batch * q_batch + t * q_t + h * q_h + w * q_w + here.head * q_head);
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    brick.q[i][part][r] = __ldg(row + 8 * part + c);
                    brick.q[i][part][r + 2] = __ldg(row + 8 * part + c + 4);
                }
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) brick.out[i][j][e] = 0.0f;
            }
        }
        float w_mask[GROUPS][2];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int key = here.halo_w + column + 8 * group + 2 * c + e;
                w_mask[group][e] = (unsigned)(key - window_start<KW>(w, n_w)) < (unsigned)KW ? 0.0f : -infinity();
            }
        }
        // ldmatrix: lane l gives the address of row l % 8 of matrix l / 8. Of a pair of groups of keys, the second is 8 keys or one row on.
        constexpr int NEXT = (GROUPS == 2 ? 8 : PITCH) * ROW_BYTES;
        const unsigned k_lane = (column + lane % 8) * ROW_BYTES + lane / 16 * NEXT + lane / 8 % 2 * 16;
        const unsigned v_lane = (column + lane % 8) * ROW_BYTES + lane / 8 % 2 * NEXT + lane / 16 * 16 + CHUNK_BYTES;

        for (int t = here.halo_t; t < here.halo_end; ++t) {
            bool sees[TILES];
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                bool seen[2];
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    seen[r] = (unsigned)(t - window_start<KT>(min(brick_t + 2 * i + r, t_last), n_t)) < (unsigned)KT;
                sees[i] = !idle && (seen[0] || seen[1]);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) brick.mask[i][group][e] = seen[e / 2] ? w_mask[group][e % 2] : -infinity();
                }
            }
            for (int row = 0; row < ROWS; row += CHUNK) {
                copy_next(slot + AHEAD < SLOTS ? slot + AHEAD : slot + AHEAD - SLOTS, slot + AHEAD < SLOTS ? parity : parity ^ 1);
                const unsigned from = ring_address + slot * 2 * CHUNK_BYTES;
                // Waiting even for what is passed over: an arrival must count for this turn of the ring, not for an earlier one.
                barrier_wait(full + 8 * slot, parity);
                const int end = min((row + CHUNK) / 2, step_end);
                for (int step = max(row / 2, step_begin); step < end; ++step) {
                    const unsigned rows = from + (2 * step - row) * PITCH * ROW_BYTES;
                    if (TILES == 2 && sees[0] && sees[TILES - 1])
                        two_rows<DTYPE, KH, PITCH, TILES, GROUPS, 0, TILES - 1>(brick, rows + k_lane, rows + v_lane, 2 * step);
                    else if (sees[0])
                        two_rows<DTYPE, KH, PITCH, TILES, GROUPS, 0, 0>(brick, rows + k_lane, rows + v_lane, 2 * step);
                    else if (sees[TILES - 1])
                        two_rows<DTYPE, KH, PITCH, TILES, GROUPS, TILES - 1, TILES - 1>(brick, rows + k_lane, rows + v_lane, 2 * step);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * slot);
                if (++slot == SLOTS) slot = 0, parity ^= 1;
            }
        }

#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = brick.sum[i][r];
                sum += from_lane_xor(sum, 1);
                sum += from_lane_xor(sum, 2);
                const float inverse = 1.0f / sum;
                const int t = brick_t + 2 * i + r;
                if (brick_w + g % 4 < n_w && brick_h + g / 4 < n_h && t <= t_last) {
                    const long long token = ((here.batch * frames + t - t_begin) * H + h) * W + w;
                    unsigned *row = (unsigned *)at<DTYPE>(out, (token * heads + here.head) * HEAD_DIM);
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        row[4 * j + c] = packed<DTYPE>(brick.out[i][j][2 * r] * inverse, brick.out[i][j][2 * r + 1] * inverse);
                }
            }
        }
    }
}
