// The one registration of the operators, so that loading a second copy of the library does no harm.
#pragma once

namespace convt_reduce {

// Registers the schemas, once per library. False where some other library already has them: then
// this copy must keep out of the way and register no kernels either.
bool define_operators();

}  // namespace convt_reduce
