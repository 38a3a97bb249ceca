// The kernels of one instruction set. Compiled once for each, with its own flags and TANDEM_ISA as its name.
#include "linear.h"
#include "recurrence.h"
#include "attention.h"  // takes tile configurations from linear.h

#define TEXT_OF(x) #x
#define NAME_OF(x) TEXT_OF(x)
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)

const Kernels JOIN(kernels_, TANDEM_ISA) = {
    NAME_OF(TANDEM_ISA),
    TANDEM_ISA::linear_tile,
    TANDEM_ISA::quantise,
    TANDEM_ISA::rms_norm,
    TANDEM_ISA::rotate,
    TANDEM_ISA::gate,
    TANDEM_ISA::add_row,
    TANDEM_ISA::add_tile,
    TANDEM_ISA::observe,
    TANDEM_ISA::write_kv,
    TANDEM_ISA::dequantise_row,
    TANDEM_ISA::attend,
    TANDEM_ISA::merge,
    TANDEM_ISA::finish,
    TANDEM_ISA::recur,
    TANDEM_ISA::convolve,
    TANDEM_ISA::enter,
    TANDEM_ISA::leave,
};
