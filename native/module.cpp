// The Python module. One `bind_*` per family; each family is one file here and one of the same name in simd/.
#include "common.h"

namespace thinwire {
void bind_common(nb::module_& m);
}

NB_MODULE(_native, m) {
    m.doc() = "thinwire's native kernels. They trust their arguments: call them through thinwire.kernels.";
    m.attr("abi") = 7;
    thinwire::bind_common(m);
    thinwire::bind_cast(m);
    thinwire::bind_integers(m);
    thinwire::bind_quantize(m);
    thinwire::bind_statistics(m);
    thinwire::bind_select(m);
    thinwire::bind_sparse(m);
    thinwire::bind_indices(m);
    thinwire::bind_hadamard(m);
    thinwire::bind_rotated(m);
    thinwire::bind_products(m);
    thinwire::bind_words(m);
}
