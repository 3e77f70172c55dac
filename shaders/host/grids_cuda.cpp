// The same for NVIDIA GPUs, whose threadgroups may take other amounts of work.
#define LILY_GRID_OF cuda_grid_of
#define LILY_SHAPES "shape_cuda.h"
#include "grids.cpp"
