#pragma once

#include <cstddef>
#include <cstdint>

size_t packed_bytes(int32_t format, int rows, int columns);

// rows [row, row + rows) of a file's matrix, each `columns` wide, to tiles. `columns` is whole tiles wide.
void pack(int32_t format, int rows, int columns, const uint8_t* file, uint8_t* out);

// The tiles of rows `rows` [count] of a packed matrix, in that order, as packing them alone would have made them.
void select_rows(int32_t format, int columns, const uint8_t* packed, const int64_t* rows, int count, uint8_t* out);
