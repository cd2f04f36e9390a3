// The Python face of the kernels. One `bind_*` per family; each family is one file.
#include <nanobind/nanobind.h>

NB_MODULE(_native, m) {
    m.doc() = "thinwire's native kernels";
    m.attr("abi") = 1;
}
