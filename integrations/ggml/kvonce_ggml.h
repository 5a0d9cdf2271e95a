/* What libggml-kvonce.so offers besides ggml_backend_init, for C and for dlsym. */
#ifndef KVONCE_GGML_H
#define KVONCE_GGML_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Counts since the library was loaded, over all backends and threads. */
typedef struct kvonce_ggml_statistics {
  int64_t ops_served;     /* GGML_OP_FLASH_ATTN_EXT nodes that were computed here */
  int64_t tokens_served;  /* their query tokens, over all sequences: layers x tokens of a model */
  int64_t ops_failed;     /* nodes whose tensors were refused when they ran; llama.cpp then returns an error */
  int64_t times_declined; /* supports_op said no to an attention node; ggml's scheduler asks several times about each */
} kvonce_ggml_statistics;

__attribute__((visibility("default"))) void kvonce_ggml_get_statistics(kvonce_ggml_statistics* statistics);

/* Several lines: the counts, how often each kernel ran, and why nodes were declined. The text is valid until the same
   thread's next call. KVONCE_GGML_STATS=1 prints it to stderr when the process ends. */
__attribute__((visibility("default"))) const char* kvonce_ggml_statistics_text(void);

/* Why the last ggml_backend_init of this thread returned NULL, or "". */
__attribute__((visibility("default"))) const char* kvonce_ggml_error(void);

#ifdef __cplusplus
}
#endif
#endif
