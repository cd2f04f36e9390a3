#include "common.h"
namespace thinwire {
void bind_quantize(nb::module_&) {}
}  // namespace thinwire
