// Only in the libraries of a wheel: a function that GCC's headers call since version 11, and that the libstdc++ of older
// systems does not have. With it the wheel runs wherever torch's does.

namespace std {

[[noreturn]] void __throw_bad_alloc();

[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { __throw_bad_alloc(); }

}  // namespace std
