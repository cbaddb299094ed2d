/* Tensors between pages that nothing may touch, so that a kernel which reads or writes outside of one ends its process.

   cc -shared -fPIC -O1 -o guard_pages.so guard_pages.c -ldl; LD_PRELOAD=./guard_pages.so python ...

   While place() is not 0, posix_memalign, by which torch's CPU allocator gets the memory of a tensor, and operator new,
   which std::vector takes, give memory in a large reserved range: a mebibyte apart, and after free() nothing may touch it
   any more. With 1 it begins where a page begins, and with 2 it ends, to 8 bytes, where one ends. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define RANGE ((size_t)1 << 40)
#define APART ((size_t)1 << 20)
#define PAGE ((size_t)4096)
#define LARGEST ((size_t)1 << 26)

static char *range, *next;
static struct { char *start; size_t size; } given[RANGE / APART]; /* by the mebibyte that holds the pointer */
static int where;

void place(int w)
{
    if (w && !range) {
        range = mmap(0, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        next = range + APART;
    }
    where = w && range != MAP_FAILED ? w : 0;
}

static void *guarded(size_t size)
{
    size_t pages = (size + PAGE - 1) / PAGE * PAGE;
    char *p = next;
    if (size > LARGEST || p + pages + APART > range + RANGE || mprotect(p, pages, PROT_READ | PROT_WRITE))
        return 0;
    next = p + (pages + 2 * APART - 1) / APART * APART;
    char *result = where == 1 ? p : p + pages - (size + 7) / 8 * 8;
    given[(result - range) / APART].start = p;
    given[(result - range) / APART].size = pages;
    return result;
}

int posix_memalign(void **p, size_t alignment, size_t size)
{
    static int (*real)(void **, size_t, size_t);
    if (where && size)
        return (*p = guarded(size)) ? 0 : ENOMEM;
    if (!real)
        real = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    return real(p, alignment, size);
}

void *_Znwm(size_t size) /* operator new */
{
    void *p = where && size ? guarded(size) : 0;
    if (!p && !(p = malloc(size ? size : 1)))
        abort();
    return p;
}

void free(void *p)
{
    static void (*real)(void *);
    if (range && (char *)p >= range && (char *)p < range + RANGE) {
        size_t k = ((char *)p - range) / APART;
        mmap(given[k].start, given[k].size, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return;
    }
    if (!real)
        real = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    real(p);
}
