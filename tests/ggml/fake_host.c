/* A ggml that is not the one libggml-kvonce.so was built for: two of its functions, and the call that loads a backend; as a
   library, or as a program that has ggml linked in. */
#include <dlfcn.h>
#include <stddef.h>

#ifdef FAKE_VERSION
const char* ggml_version(void) { return FAKE_VERSION; }
#endif
const char* ggml_op_name(int op) {
  (void)op;
  return FAKE_OP;
}

void* fake_load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return NULL;
  void* (*init)(void) = (void* (*)(void))dlsym(library, "ggml_backend_init");
  void* volatile registry = init(); /* volatile: the call must come from here, not be the last thing done */
  return registry;
}

/* Where this is a program. */
int main(int argc, char** argv) { return argc == 2 && fake_load(argv[1]) != NULL ? 0 : 3; }
