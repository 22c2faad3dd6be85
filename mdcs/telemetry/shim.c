/* A byte-exact meter of tensor memory, preloaded with LD_PRELOAD.
 *
 * torch's CPU allocator takes every tensor from posix_memalign(…, 64, bytes) and gives it back with
 * free(). This library stands in front of both, remembers (address -> requested bytes, tag) of every
 * such block, and keeps live bytes and peaks per tag and in total. Other alignments, malloc and mmap
 * pass through uncounted; another library that asks for 64-byte alignment (oneDNN's scratchpads) is
 * counted like a tensor, which is what a memory budget wants.
 *
 * Exactness: one lock guards the table and all counters, so a total, its peak and the per-tag snapshot
 * at that peak always belong together. Speed: free() is called for everything in the process; it reaches
 * the lock only for 64-byte aligned addresses whose bucket in a lock-free counting filter is not empty.
 *
 * Nothing here may allocate through malloc: the table lives in its own mmap.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))
/* initial-exec: reading a thread-local must never make the dynamic linker allocate. */
#define PER_THREAD static _Thread_local __attribute__((tls_model("initial-exec")))

enum { TAGS = 16, ALIGNMENT = 64, FILTER_BITS = 16, FIRST_TABLE_BITS = 14 };

/* ---- the allocator behind this one --------------------------------------------------------------------- */

static int (*next_posix_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);
static void *(*next_realloc)(void *, size_t);
/* dlsym may itself allocate or free: such calls are refused or ignored, not recursed into. */
PER_THREAD bool resolving;

static bool resolve(void) {
    if (resolving) return false;
    resolving = true;
    *(void **)&next_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    *(void **)&next_realloc = dlsym(RTLD_NEXT, "realloc");
    *(void **)&next_free = dlsym(RTLD_NEXT, "free");
    resolving = false;
    return next_posix_memalign && next_realloc && next_free;
}

/* ---- counters (guarded by `lock`) ---------------------------------------------------------------------- */

struct bytes {
    int64_t tag[TAGS];
    int64_t total;
};

static pthread_mutex_t lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
static struct bytes live;
static struct bytes peak;    /* since mdcs_reset_peaks */
static struct bytes window;  /* peaks since the last mdcs_window */
static struct bytes at_peak; /* live bytes when peak.total was last reached */
PER_THREAD int current_tag;

/* Threads of others, known by their name, in which nobody calls mdcs_set_tag: what they allocate has this tag. */
static char others_name[16];
static _Atomic int others_tag;
PER_THREAD enum { UNKNOWN, OURS, OTHERS } owner;

static int tag_of_thread(void) {
    int tag = current_tag ? 0 : atomic_load_explicit(&others_tag, memory_order_acquire);
    if (tag == 0) return current_tag;
    if (owner == UNKNOWN) {
        char name[sizeof others_name] = "";
        pthread_getname_np(pthread_self(), name, sizeof name);
        owner = strcmp(name, others_name) == 0 ? OTHERS : OURS;
    }
    return owner == OTHERS ? tag : current_tag;
}

static void raise_to(int64_t *highest, int64_t value) {
    if (value > *highest) *highest = value;
}

static void note_tag_peaks(int tag) {
    raise_to(&peak.tag[tag], live.tag[tag]);
    raise_to(&window.tag[tag], live.tag[tag]);
}

static void count_in(int tag, int64_t bytes) {
    live.tag[tag] += bytes;
    live.total += bytes;
    note_tag_peaks(tag);
    raise_to(&window.total, live.total);
    if (live.total > peak.total) {
        peak.total = live.total;
        at_peak = live;
    }
}

static void count_out(int tag, int64_t bytes) {
    live.tag[tag] -= bytes;
    live.total -= bytes;
}

/* ---- live blocks (guarded by `lock`): open addressing, linear probing, deletion by shifting back ------- */

struct block {
    uintptr_t address; /* 0: an empty place */
    int64_t bytes;
    int tag;
};

static struct block *table;
static size_t places, used; /* places: a power of two, or 0 before the first block */
static int table_bits;

/* How many live blocks hash into each bucket. Written under the lock, read without it: whoever frees a
 * tracked block has received it from the thread that allocated it, so it sees that block's own
 * increment; a bucket read as 0 proves "not tracked". */
static _Atomic uint32_t filter[1 << FILTER_BITS];

static size_t hash(uintptr_t address, int bits) {
    return (size_t)(((uint64_t)address / ALIGNMENT * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - bits));
}

static void add_to_filter(uintptr_t address, int change) {
    _Atomic uint32_t *bucket = &filter[hash(address, FILTER_BITS)];
    uint32_t blocks = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, blocks + (uint32_t)change, memory_order_relaxed);
}

static bool maybe_tracked(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer;
    return address != 0 && address % ALIGNMENT == 0 &&
           atomic_load_explicit(&filter[hash(address, FILTER_BITS)], memory_order_relaxed) != 0;
}

/* The place that holds the address, or the empty one where it belongs. Needs at least one empty place. */
static struct block *find(uintptr_t address) {
    size_t i = hash(address, table_bits);
    while (table[i].address != 0 && table[i].address != address) i = (i + 1) & (places - 1);
    return &table[i];
}

static bool grow(void) {
    int bits = places ? table_bits + 1 : FIRST_TABLE_BITS;
    size_t size = sizeof(struct block) << bits;
    struct block *old = table;
    size_t old_places = places;
    void *fresh = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) return false;
    table = fresh;
    table_bits = bits;
    places = (size_t)1 << bits;
    for (size_t i = 0; i < old_places; i++)
        if (old[i].address != 0) *find(old[i].address) = old[i];
    if (old) munmap(old, old_places * sizeof(struct block));
    return true;
}

static void erase(struct block *block) {
    size_t hole = (size_t)(block - table);
    add_to_filter(block->address, -1);
    count_out(block->tag, block->bytes);
    used--;
    /* Close the hole: a later block of the same run moves back into it unless that would put it before
     * its own home. */
    for (size_t i = (hole + 1) & (places - 1); table[i].address != 0; i = (i + 1) & (places - 1)) {
        size_t from_home = (i - hash(table[i].address, table_bits)) & (places - 1);
        size_t from_hole = (i - hole) & (places - 1);
        if (from_home >= from_hole) {
            table[hole] = table[i];
            hole = i;
        }
    }
    table[hole].address = 0;
}

/* False when there is no memory for the table: the allocation then fails, rather than going uncounted. */
static bool track(void *pointer, int64_t bytes, int tag) {
    uintptr_t address = (uintptr_t)pointer;
    bool room = true;
    pthread_mutex_lock(&lock);
    if (2 * (used + 1) > places) room = grow() || used + 1 < places;
    if (room) {
        struct block *block = find(address);
        if (block->address != 0) { /* freed past us (by a statically linked free) and handed out again */
            erase(block);
            block = find(address);
        }
        *block = (struct block){address, bytes, tag};
        used++;
        add_to_filter(address, 1);
        count_in(tag, bytes);
    }
    pthread_mutex_unlock(&lock);
    return room;
}

/* Forgets a block and, if it was known, describes it. Must precede the real free: the address may be
 * handed out again at once. */
static bool untrack(void *pointer, struct block *forgotten) {
    bool known = false;
    pthread_mutex_lock(&lock);
    if (places) {
        struct block *block = find((uintptr_t)pointer);
        known = block->address != 0;
        if (known) {
            if (forgotten) *forgotten = *block;
            erase(block);
        }
    }
    pthread_mutex_unlock(&lock);
    return known;
}

/* ---- a forked child must not inherit a lock that another thread held ----------------------------------- */

static void hold(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void start(void) {
    resolve();
    pthread_atfork(hold, release, release);
}

/* ---- the interposed functions -------------------------------------------------------------------------- */

EXPORT int posix_memalign(void **pointer, size_t alignment, size_t bytes) {
    if (!next_posix_memalign && !resolve()) return ENOMEM;
    int error = next_posix_memalign(pointer, alignment, bytes);
    if (error == 0 && alignment == ALIGNMENT && *pointer && !track(*pointer, (int64_t)bytes, tag_of_thread())) {
        next_free(*pointer);
        return ENOMEM;
    }
    return error;
}

EXPORT void free(void *pointer) {
    if (!next_free && !resolve()) return;
    if (maybe_tracked(pointer)) untrack(pointer, NULL);
    next_free(pointer);
}

/* torch never reallocates. Should someone, the block leaves the meter: it is no tensor, and need not be
 * aligned any more. */
EXPORT void *realloc(void *pointer, size_t bytes) {
    struct block forgotten;
    if (!next_realloc && !resolve()) {
        errno = ENOMEM;
        return NULL;
    }
    bool known = maybe_tracked(pointer) && untrack(pointer, &forgotten);
    void *moved = next_realloc(pointer, bytes);
    /* It failed: the old block still lives. */
    if (known && !moved && bytes > 0) track(pointer, forgotten.bytes, forgotten.tag);
    return moved;
}

/* ---- reading the meter --------------------------------------------------------------------------------- */

static bool valid(int tag) { return 0 <= tag && tag < TAGS; }

static int64_t read_locked(const int64_t *counter) {
    pthread_mutex_lock(&lock);
    int64_t value = *counter;
    pthread_mutex_unlock(&lock);
    return value;
}

/* Tags what this thread allocates from now on; returns the tag before, or -1 (and changes nothing) for a
 * wrong tag. */
EXPORT int mdcs_set_tag(int tag) {
    int previous = current_tag;
    if (!valid(tag)) return -1;
    current_tag = tag;
    return previous;
}

/* Tags what threads of that name (at most 15 characters) allocate, unless they set a tag themselves. One name per
 * process; false (and nothing changes) for a wrong tag. */
EXPORT bool mdcs_tag_threads(const char *name, int tag) {
    if (!valid(tag)) return false;
    strncpy(others_name, name, sizeof others_name - 1);
    atomic_store_explicit(&others_tag, tag, memory_order_release);
    return true;
}

/* Moves a live block to another tag; returns its bytes, or -1 for an unknown block or a wrong tag.
 * Totals do not change; while the total is at its peak, the snapshot follows the move, so that a block
 * labelled just after its allocation is reported by its label. */
EXPORT int64_t mdcs_retag(void *pointer, int tag) {
    int64_t bytes = -1;
    if (!valid(tag) || !maybe_tracked(pointer)) return -1;
    pthread_mutex_lock(&lock);
    struct block *block = find((uintptr_t)pointer); /* the filter is not empty, so the table exists */
    if (block->address != 0) {
        bytes = block->bytes;
        live.tag[block->tag] -= bytes;
        live.tag[tag] += bytes;
        block->tag = tag;
        note_tag_peaks(tag);
        if (live.total == peak.total) at_peak = live;
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

EXPORT int64_t mdcs_live(int tag) { return valid(tag) ? read_locked(&live.tag[tag]) : -1; }
EXPORT int64_t mdcs_peak(int tag) { return valid(tag) ? read_locked(&peak.tag[tag]) : -1; }
EXPORT int64_t mdcs_total_live(void) { return read_locked(&live.total); }
EXPORT int64_t mdcs_total_peak(void) { return read_locked(&peak.total); }

/* Live bytes per tag at the instant of the total peak: they add up to it. */
EXPORT void mdcs_snapshot(int64_t out[TAGS]) {
    pthread_mutex_lock(&lock);
    memcpy(out, at_peak.tag, sizeof at_peak.tag);
    pthread_mutex_unlock(&lock);
}

EXPORT void mdcs_reset_peaks(void) {
    pthread_mutex_lock(&lock);
    peak = live;
    at_peak = live;
    pthread_mutex_unlock(&lock);
}

/* Peaks per tag, then of the total, since the previous call; the next window starts at what is live now. */
EXPORT void mdcs_window(int64_t out[TAGS + 1]) {
    pthread_mutex_lock(&lock);
    memcpy(out, window.tag, sizeof window.tag);
    out[TAGS] = window.total;
    window = live;
    pthread_mutex_unlock(&lock);
}
