// What the kernels that rotate q and k share: the rotation, and the order of the columns of the
// q,k,v product that a GEMM can rotate by itself.
#pragma once

namespace rotary {

// (a, b) -> (a cos t - b sin t, a sin t + b cos t). One rounding of each product that is not fused,
// whatever the compiler would choose: all kernels give the same bits.
__device__ __forceinline__ void turn(float& a, float& b, float cosine, float sine) {
  const float turned = __fmaf_rn(a, cosine, -__fmul_rn(b, sine));
  b = __fmaf_rn(a, sine, __fmul_rn(b, cosine));
  a = turned;
}

// Paired columns. A group of 32 columns holds 16 pairs of a head, those of fragment f (8 columns)
// at 4 q + f for q = 0 .. 3: what wgmma gives a lane of four fragments is four pairs in a row, both
// elements of each. Groups of `alike` heads alternate: the same pairs of so many heads lie together
// and are turned by the same cosines and sines. `alike` divides the heads of q and those of k and
// v; 32 divides head_dim. pyruntime/ops/qkv.py lays out the rows of W accordingly.
constexpr int kGroup = 32;

// The column of the first element of a pair; the second follows it. Heads: of q, then k, then v.
__device__ __forceinline__ int paired_column(int head, int pair, int head_dim, int alike) {
  const int group = pair / 16 * alike + head % alike;
  return head / alike * alike * head_dim + group * kGroup + pair % 4 * 8 + pair / 4 % 4 * 2;
}

// A group's place among the heads; from one group to the next without division.
struct Group {
  int base, which, pair;  // its first head of those that alternate, its own among them, first pair

  __device__ __forceinline__ Group(int column, int head_dim, int alike) {
    const int group = column / kGroup, together = head_dim / kGroup * alike;
    base = group / together * alike;
    which = group % together % alike;
    pair = group % together / alike * 16;
  }
  __device__ __forceinline__ void advance(int head_dim, int alike) {
    if (++which < alike) return;
    which = 0;
    pair += 16;
    if (pair < head_dim / 2) return;
    pair = 0;
    base += alike;
  }
  __device__ __forceinline__ int head() const { return base + which; }
};

}  // namespace rotary
