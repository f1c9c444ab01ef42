// What the schedule of an attention kernel says: which rows and keys are worked on together.
#pragma once

#include <cstdint>

#include "../../core/spec.cuh"

namespace attention {

// Rows of one sequence, as many as a tile holds, of the heads of one column, and the key tiles
// [first, last) that they are multiplied with; tiles are counted from position 0. Of several parts
// with the same rows each leaves its sums in a slot of its own, and the last to arrive adds them in
// the order of the slots.
struct alignas(16) Part {
  // What the thread that copies needs, in two loads of 16 bytes:
  const spec::TensorMap* maps;  // of the sequence's cache
  int32_t row;                  // the first, of the activations
  int32_t column;
  int32_t first, last;  // key tiles; past the last part of a list, last is 0
  int32_t kv_head;
  // and what the others do:
  int32_t token;     // the first, of the sequence; negative where the tile reaches back past it
  int32_t position;  // of the first row
  int32_t end;       // of the sequence's keys
  int32_t parts;     // with these rows; 1: nothing to add
  int32_t index;     // of this part among them
  int32_t slot;      // of the first of them
  int32_t group;     // where they count their arrivals
};

}  // namespace attention
