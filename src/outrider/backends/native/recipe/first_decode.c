/* The first calls of a library that was just built, and the only source of its own that it has. */
#include <math.h>
#include <stddef.h>

#include "llama.h"

#define TOKENS 8

#ifdef MAINLINE
#define BATCH(tokens, count, start) llama_batch_get_one(tokens, count)
#define FREE_MODEL llama_model_free
#define NUM_TOKENS(context) llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)))
#else
#define BATCH(tokens, count, start) llama_batch_get_one(tokens, count, start, 0)
#define FREE_MODEL llama_free_model
#define NUM_TOKENS(context) llama_n_vocab(llama_get_model(context))
#endif

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) level;
    (void) text;
    (void) data;
}

/* Whether a call over `count` tokens gives numbers. */
static int decodes(struct llama_context * context, llama_token * tokens, int count, int start) {
    (void) start;
    if (llama_decode(context, BATCH(tokens, count, start)) != 0) {
        return 0;
    }
    const float * logits = llama_get_logits_ith(context, -1);
    const int size = NUM_TOKENS(context);
    for (int i = 0; logits != NULL && i < size; i++) {
        if (!isfinite(logits[i])) {
            return 0;
        }
    }
    return logits != NULL;
}

static int works(const char * path, bool other) {
    struct llama_model_params model_params = llama_model_default_params();
#ifdef MAINLINE
    model_params.n_gpu_layers = other ? -1 : 0;
#else
    model_params.repack_tensors = other;
#endif
    struct llama_model * model = llama_model_load_from_file(path, model_params);
    if (model == NULL) {
        return 0;
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 64;
    params.n_threads = params.n_threads_batch = 2;
    struct llama_context * context = llama_init_from_model(model, params);
    llama_token tokens[TOKENS] = {1, 2, 3, 4, 5, 6, 7, 8};
    int result = context != NULL && decodes(context, tokens, TOKENS, 0) && decodes(context, tokens, 1, TOKENS);
    llama_free(context);
    FREE_MODEL(model);
    return result;
}

/* 0 when the model at `path` decodes: as its file has it and repacked, or on the processor and on the GPU. */
int outrider_first_decode(const char * path) {
    llama_log_set(quiet, NULL);
    llama_backend_init();
    return works(path, false) && works(path, true) ? 0 : 1;
}
