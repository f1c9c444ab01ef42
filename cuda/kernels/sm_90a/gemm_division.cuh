// How the units of a product are divided among the clusters of a persistent grid.
//
// Whole, a cluster takes every (clusters in the grid)-th unit, and the last wave may have work for
// few of them. Where the units are less than a wave they can be shared (stream-K,
// arXiv:2301.03598), by `parts` clusters each at most, on average: the units' steps along k, one
// unit after the other, are divided evenly, and each cluster takes a part, which begins and ends
// inside of units. (To share what a product of several waves leaves over does not pay:
// docs/performance.md.)
//
// The owner of a unit is who has its step 0. Others have its further steps: each as the first thing
// that it does, so that the owner waits little. Cluster 0 takes the last part, so an owner waits
// for clusters of lower numbers alone, which started before it: they need not all run at a time.
#pragma once

struct Division {
  int units, steps;       // of the product; along k in a unit
  int cluster, clusters;  // this one's number, and how many there are
  int shared;             // units that are shared: all or none
  int from, to;           // this cluster's part of their steps

  __device__ __forceinline__ Division(int units, int steps, int cluster, int clusters, int parts)
      : units(units),
        steps(steps),
        cluster(cluster),
        clusters(clusters),
        shared(0),
        from(0),
        to(0) {
    if (parts <= 1 || units >= clusters) return;
    shared = units;
    const int sharing = min(clusters, shared * min(parts, steps));  // so that none has no step
    if (cluster >= sharing) return;
    // Where the first `parts_before` of `sharing` equal parts end: rounded down, and without
    // products that leave 32 bits.
    const auto end_of = [&](int parts_before) {
      const int place = parts_before * shared;  // in units, times `sharing`
      return place / sharing * steps + place % sharing * steps / sharing;
    };
    from = end_of(sharing - 1 - cluster);
    to = end_of(sharing - cluster);
  }

  // This cluster's units, of each its steps [first, last):
  // for (unit = start(); unit < units; unit = next(unit)).
  __device__ __forceinline__ int start() const {
    return from < to ? from / steps : shared + cluster;
  }
  __device__ __forceinline__ int next(int unit) const {
    if (unit >= shared) return unit + clusters;
    return (unit + 1) * steps < to ? unit + 1 : shared + cluster;
  }
  __device__ __forceinline__ int first(int unit) const {
    return unit < shared ? max(from - unit * steps, 0) : 0;
  }
  __device__ __forceinline__ int last(int unit) const {
    return unit < shared ? min(to - unit * steps, steps) : steps;
  }
};
