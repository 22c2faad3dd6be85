/* A byte-exact meter of tensor memory, loaded into a running process.
 *
 * torch's CPU allocator takes every tensor from posix_memalign(…, 64, bytes), called from libc10, and gives it back
 * with free(), called from any of torch's libraries. mdcs_attach makes the global offset tables of those libraries name
 * the two functions of this file, which remember (address -> requested bytes, tag) of every such block, and keep live
 * bytes and peaks per tag and in total. Other alignments, malloc and mmap pass through uncounted, and so does what
 * libtorch asks for: oneDNN keeps an object of some 100 KB for each shape of each operator that has run, which no plan
 * can know. Blocks that are older than the meter are counted if mdcs_adopt is told of them, else they pass through.
 *
 * Exactness: one lock guards the table and all counters, so a total and its peak always belong together. Speed: torch's libraries free more than tensors; free() reaches the lock only for 64-byte
 * aligned addresses whose bucket in a lock-free counting filter is not empty.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#if defined __x86_64__
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT };
#elif defined __aarch64__
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT };
#else
#error "memory on CPU is measured on x86-64 and aarch64 only"
#endif

enum { TAGS = 16, ALIGNMENT = 64, FILTER_BITS = 16, FIRST_TABLE_BITS = 14 };

/* ---- counters (guarded by `lock`) ---------------------------------------------------------------------- */

struct bytes {
    int64_t tag[TAGS];
    int64_t total;
};

static pthread_mutex_t lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
static struct bytes live;
static struct bytes peak;   /* since mdcs_reset_peaks */
static struct bytes window; /* peaks since the last reading of it */
static _Thread_local int current_tag;

/* Threads of others, known by their name, in which nobody calls mdcs_set_tag: what they allocate has this tag. */
static char others_name[16];
static _Atomic int others_tag;
static _Thread_local enum { UNKNOWN, OURS, OTHERS } owner;

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
    raise_to(&peak.total, live.total);
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

/* Forgets a block if it is known. Must precede the real free: the address may be handed out again at once. */
static void untrack(void *pointer) {
    pthread_mutex_lock(&lock);
    if (places) {
        struct block *block = find((uintptr_t)pointer);
        if (block->address != 0) erase(block);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- a forked child must not inherit a lock that another thread held ----------------------------------- */

static void hold(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void start(void) { pthread_atfork(hold, release, release); }

/* ---- what torch's libraries call ----------------------------------------------------------------------- */

static int counted_posix_memalign(void **pointer, size_t alignment, size_t bytes) {
    int error = posix_memalign(pointer, alignment, bytes);
    if (error == 0 && alignment == ALIGNMENT && *pointer && !track(*pointer, (int64_t)bytes, tag_of_thread())) {
        free(*pointer);
        return ENOMEM;
    }
    return error;
}

static void counted_free(void *pointer) {
    if (maybe_tracked(pointer)) untrack(pointer);
    free(pointer);
}

static uintptr_t counted(const char *name, bool allocates) {
    if (allocates && strcmp(name, "posix_memalign") == 0) return (uintptr_t)&counted_posix_memalign;
    return strcmp(name, "free") == 0 ? (uintptr_t)&counted_free : 0;
}

/* A loaded library. The linker makes the pages from sealed to sealed_end read-only after relocation. */
struct library {
    bool has_allocator;
    uintptr_t base, page, sealed, sealed_end;
    const ElfW(Sym) *symbols;
    const char *strings;
};

/* Makes the offset table of these relocations name our functions. Returns how many slots name them, or -1 where the
 * system forbids it. */
static int redirect(const struct library *in, const ElfW(Rela) *entry, size_t bytes) {
    int redirected = 0;
    for (const ElfW(Rela) *end = entry + bytes / sizeof *entry; entry < end; entry++) {
        uint32_t type = (uint32_t)ELF64_R_TYPE(entry->r_info);
        if (type != JUMP_SLOT && type != GLOB_DAT) continue;
        uintptr_t ours = counted(in->strings + in->symbols[ELF64_R_SYM(entry->r_info)].st_name, in->has_allocator);
        if (ours == 0) continue;
        uintptr_t slot = in->base + entry->r_offset;
        void *page = (void *)(slot & -in->page);
        bool sealed = in->sealed <= slot && slot < in->sealed_end;
        if (sealed && mprotect(page, in->page, PROT_READ | PROT_WRITE) != 0) return -1;
        atomic_store((_Atomic uintptr_t *)slot, ours); /* other threads call through it meanwhile */
        if (sealed) mprotect(page, in->page, PROT_READ);
        redirected++;
    }
    return redirected;
}

/* glibc stores addresses in the dynamic section when it loads a library; other linkers leave offsets there. */
static const void *located(const struct library *in, ElfW(Addr) address) {
    return (const void *)(address < in->base ? in->base + address : address);
}

static int attach_library(struct dl_phdr_info *info, size_t size, void *attached) {
    const char *slash = strrchr(info->dlpi_name, '/'), *name = slash ? slash + 1 : info->dlpi_name;
    struct library in = {.base = info->dlpi_addr, .page = (uintptr_t)sysconf(_SC_PAGESIZE)};
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Rela) *jumps = NULL, *data = NULL;
    size_t jump_bytes = 0, data_bytes = 0;
    (void)size;
    in.has_allocator = strncmp(name, "libc10.", 7) == 0;
    if (strncmp(name, "libc10", 6) != 0 && strncmp(name, "libtorch", 8) != 0) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t begin = in.base + part->p_vaddr;
        if (part->p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)begin;
        if (part->p_type == PT_GNU_RELRO) {
            in.sealed = begin & -in.page;
            in.sealed_end = (begin + part->p_memsz) & -in.page;
        }
    }
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) switch (dynamic->d_tag) {
            case DT_SYMTAB: in.symbols = located(&in, dynamic->d_un.d_ptr); break;
            case DT_STRTAB: in.strings = located(&in, dynamic->d_un.d_ptr); break;
            case DT_JMPREL: jumps = located(&in, dynamic->d_un.d_ptr); break;
            case DT_RELA: data = located(&in, dynamic->d_un.d_ptr); break;
            case DT_PLTRELSZ: jump_bytes = dynamic->d_un.d_val; break;
            case DT_RELASZ: data_bytes = dynamic->d_un.d_val; break;
        }
    /* libc10 has the allocator. Freed without being counted out is worse than not counted: give up at once. */
    int slots = redirect(&in, data, data_bytes), more = slots < 0 ? -1 : redirect(&in, jumps, jump_bytes);
    if (more < 0) return *(int *)attached = -1;
    if (in.has_allocator) *(int *)attached += slots + more;
    return 0;
}

/* Counts from now on what torch allocates. Returns how many calls of its allocator are counted: 0 where there is no
 * libc10, -1 where the system forbids it. To call it again changes nothing. */
EXPORT int mdcs_attach(void) {
    int attached = 0;
    dl_iterate_phdr(attach_library, &attached);
    return attached;
}

/* Counts a block that is older than the meter and comes from torch's allocator. False where there is no memory. */
EXPORT bool mdcs_adopt(void *pointer, int64_t bytes) {
    pthread_mutex_lock(&lock);
    bool known = places && find((uintptr_t)pointer)->address != 0;
    pthread_mutex_unlock(&lock);
    return known || track(pointer, bytes, 0);
}

/* ---- reading the meter --------------------------------------------------------------------------------- */

/* A tag is a number from 0 to TAGS - 1, which the caller makes sure of. */

/* Tags what this thread allocates from now on; returns the tag before. */
EXPORT int mdcs_set_tag(int tag) {
    int previous = current_tag;
    current_tag = tag;
    return previous;
}

/* Tags what threads of that name (at most 15 characters) allocate, unless they set a tag themselves. One name per
 * process. */
EXPORT void mdcs_tag_threads(const char *name, int tag) {
    strncpy(others_name, name, sizeof others_name - 1);
    atomic_store_explicit(&others_tag, tag, memory_order_release);
}

/* Moves a live block to another tag; returns its bytes, or 0 for an unknown block. */
EXPORT int64_t mdcs_retag(void *pointer, int tag) {
    int64_t bytes = 0;
    if (!maybe_tracked(pointer)) return 0;
    pthread_mutex_lock(&lock);
    struct block *block = find((uintptr_t)pointer); /* the filter is not empty, so the table exists */
    if (block->address != 0) {
        bytes = block->bytes;
        live.tag[block->tag] -= bytes;
        live.tag[tag] += bytes;
        block->tag = tag;
        note_tag_peaks(tag);
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

EXPORT void mdcs_reset_peaks(void) {
    pthread_mutex_lock(&lock);
    peak = live;
    pthread_mutex_unlock(&lock);
}

/* Reads bytes per tag, then of the total: those that are live (0), their peaks (1), or the peaks since the previous
 * call with 2; the next window starts at what is live now. */
EXPORT void mdcs_read(int which, int64_t out[TAGS + 1]) {
    const struct bytes *read[] = {&live, &peak, &window};
    pthread_mutex_lock(&lock);
    memcpy(out, read[which], sizeof live);
    if (which == 2) window = live;
    pthread_mutex_unlock(&lock);
}
