/* A Neuron runtime without devices: it logs every call to $FAKE_NRT_LOG and keeps tensors in memory.
 * A "NEFF" is text: "output0=input1 output1=input0" says which input each output is a copy of.
 * A collective load waits until all its ranks are loading, as the real one does. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { size_t size; char *data; } tensor;
typedef struct { char names[64][32]; tensor *tensors[64]; int count; } tensor_set;
typedef struct { char text[4096]; int rank; } model;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t all_here = PTHREAD_COND_INITIALIZER;
static unsigned loading = 0;

static void say(const char *format, ...) {
    va_list arguments;
    pthread_mutex_lock(&mutex);
    FILE *log = fopen(getenv("FAKE_NRT_LOG"), "a");
    va_start(arguments, format);
    vfprintf(log, format, arguments);
    va_end(arguments);
    fclose(log);
    pthread_mutex_unlock(&mutex);
}

int nrt_init(int framework, const char *version, const char *fal) {
    say("init framework=%d\n", framework);
    return 0;
}
void nrt_close(void) { say("close\n"); }
int nrt_get_visible_vnc_count(uint32_t *count) { *count = 4; return 0; }

static model *made(const void *neff, size_t size, int rank) {
    model *new = calloc(1, sizeof(model));
    memcpy(new->text, neff, size);
    new->rank = rank;
    return new;
}
int nrt_load(const void *neff, size_t size, int32_t core, int32_t count, void **result) {
    say("load size=%zu core=%d count=%d\n", size, core, count);
    *result = made(neff, size, 0);
    return size ? 0 : 2;
}
int nrt_load_collectives(const void *neff, size_t size, int32_t core, int32_t count, uint32_t rank,
                         uint32_t ranks, void **result) {
    say("load_collectives core=%d count=%d rank=%u ranks=%u\n", core, count, rank, ranks);
    pthread_mutex_lock(&mutex);
    if (++loading % ranks == 0) pthread_cond_broadcast(&all_here);
    else pthread_cond_wait(&all_here, &mutex);
    pthread_mutex_unlock(&mutex);
    *result = made(neff, size, rank);
    return 0;
}
int nrt_unload(void *loaded) { say("unload\n"); free(loaded); return 0; }

int nrt_tensor_allocate(int placement, int core, size_t size, const char *name, void **result) {
    tensor *new = calloc(1, sizeof(tensor));
    new->size = size;
    new->data = calloc(1, size);
    *result = new;
    say("tensor placement=%d core=%d size=%zu\n", placement, core, size);
    return 0;
}
void nrt_tensor_free(void **freed) {
    tensor *old = *freed;
    free(old->data);
    free(old);
    say("free\n");
}
int nrt_tensor_read(const void *from, void *buffer, size_t offset, size_t size) {
    memcpy(buffer, ((tensor *)from)->data + offset, size);
    return 0;
}
int nrt_tensor_write(void *to, const void *buffer, size_t offset, size_t size) {
    if (offset + size > ((tensor *)to)->size) return 2;
    memcpy(((tensor *)to)->data + offset, buffer, size);
    say("write size=%zu\n", size);
    return 0;
}

int nrt_allocate_tensor_set(void **result) { *result = calloc(1, sizeof(tensor_set)); return 0; }
void nrt_destroy_tensor_set(void **set) { free(*set); *set = NULL; }
int nrt_add_tensor_to_tensor_set(void *into, const char *name, void *added) {
    tensor_set *set = into;
    strncpy(set->names[set->count], name, 31);
    set->tensors[set->count++] = added;
    return 0;
}
static tensor *named(const tensor_set *set, const char *name) {
    for (int index = 0; index < set->count; index++)
        if (!strcmp(set->names[index], name)) return set->tensors[index];
    return NULL;
}
int nrt_execute(void *loaded, const void *inputs, void *outputs) {
    model *self = loaded;
    char text[4096], *rest = text;
    strcpy(text, self->text);
    say("execute rank=%d\n", self->rank);
    for (char *pair; (pair = strsep(&rest, " "));) {
        char *equals = strchr(pair, '=');
        *equals = 0;
        tensor *to = named(outputs, pair), *from = named(inputs, equals + 1);
        if (!to || !from || to->size != from->size) return 1002;
        if (to != from) memcpy(to->data, from->data, to->size);
    }
    return 0;
}
