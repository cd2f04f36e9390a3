#include "common.h"
namespace thinwire {
void bind_statistics(nb::module_&) {}
}  // namespace thinwire
