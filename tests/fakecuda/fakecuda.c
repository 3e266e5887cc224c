/* fakecuda: a stand-in for libcuda.so.1 without a GPU. Documented driver API only, and of it what kvstored uses.
 *
 * Device memory is a memfd; a device pointer is the address of a reservation without any access, so code of the
 * host that follows it faults, as it would on a GPU. Copies go through a second mapping of the same memfd. An IPC
 * handle names a process and a descriptor of it, which an importer opens by /proc: the memory lives on when its
 * exporter dies, as with the real driver, and a dead exporter's handle opens no more. Memory that is made by chunks
 * (cuMemCreate) has no such handles: its chunks are shared by descriptors. Streams are threads that do
 * their work in order, and read memory when they do it: memory that was freed too early shows.
 *
 * Environment:
 *   FAKECUDA_DIR          where live allocations are noted, so that all processes agree on what memory is used
 *   FAKECUDA_DEVICES      how many there are (1)         CUDA_VISIBLE_DEVICES  as usual, ordinals only
 *   FAKECUDA_MEM_MB       memory of each (256)           FAKECUDA_HOSTREG_MAX  bytes that one registration may have
 *   FAKECUDA_GBPS         speed of copies, 0: no limit   FAKECUDA_OP_DELAY_US  before each piece of work of a stream
 *   FAKECUDA_DRIVER       version (13000); before 12080 there is no cuMemcpyBatchAsync, before 13000 the older one
 *   FAKECUDA_KERNELS      a library with kernels for the CPU, NAME_on_cpu each (kernels_on_cpu.h); without it there are none
 *   FAKECUDA_NO_IPC       no memory can be shared by handles, as on MIG and WSL
 *   FAKECUDA_HANDLE_PID   the process id in handles, as in a container that counts its own processes
 *   FAKECUDA_READ_ONLY    0: memory that is mapped read-only cannot be registered (1)
 *   FAKECUDA_STRICT       copies of memory that is not registered fail, instead of being synchronous
 *   FAKECUDA_FAULT        NAME=CODE@N[+],... : call N (first: 1; +: and all after it) of NAME fails. NAME is a function
 *                         as exported, or `copy` (the work itself, in its stream: such an error stays), or `*`. CODE is
 *                         a CUresult, `hang` (the call never returns), `die` (SIGKILL), or `hold` (it goes on when
 *                         the fault file has changed; meanwhile there is a file of that name with `.held` after it)
 *   FAKECUDA_FAULT_FILE   a file with such a text, read again whenever it has changed; to be replaced, not written to
 */
#define _GNU_SOURCE
#include "driver_api.h"
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define MAX_FAULTS 64
#define PAGE 4096ull
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif
#define HANDLE_MAGIC 0x464b4d454d303031ull

/* ---- settings ---- */

static int g_devices = 1, g_visible[MAX_DEVICES], g_visible_count, g_driver = 13000, g_strict;
static int g_no_ipc, g_handle_pid, g_read_only = 1;
static size_t g_memory_bytes = 256u << 20, g_register_max = 512ull << 30;
static double g_gbps;
static long g_delay_us;
static char g_dir[256];
static const char* g_fault_file;
static pid_t g_pid;          /* of the process that called cuInit; a fork may not go on */
static _Atomic int g_sticky; /* an error that ends the context */
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

/* ---- faults ---- */

enum { CODE_HANG = -1, CODE_DIE = -2, CODE_HOLD = -3 };
static struct fault {
  char name[64];
  int code;
  long at, calls;
  int onwards;
} g_faults[MAX_FAULTS];
static int g_fault_count;
static long g_fault_number; /* of the text that was read last */
static struct timespec g_fault_changed;
static char g_fault_text[4096];
static pthread_mutex_t g_fault_lock = PTHREAD_MUTEX_INITIALIZER;

static void set_faults(const char* text) {
  char copy[4096], *rest = NULL;
  snprintf(copy, sizeof copy, "%s", text);
  g_fault_count = 0;
  for (char* t = strtok_r(copy, ",\n", &rest); t && g_fault_count < MAX_FAULTS; t = strtok_r(NULL, ",\n", &rest)) {
    struct fault* f = &g_faults[g_fault_count];
    char* code = strchr(t, '=');
    if (!code) continue;
    *code++ = 0;
    char* at = strchr(code, '@');
    *f = (struct fault){.at = at ? atol(at + 1) : 1, .onwards = at && strchr(at, '+')};
    f->code = !strncmp(code, "hang", 4)   ? CODE_HANG
              : !strncmp(code, "die", 3)  ? CODE_DIE
              : !strncmp(code, "hold", 4) ? CODE_HOLD
                                          : atoi(code);
    snprintf(f->name, sizeof f->name, "%s", t);
    g_fault_count++;
  }
}

/* By its text too: a file that is emptied and written within a tick of the kernel's clock changes its time once. */
static void read_fault_file(void) {
  struct stat now;
  char text[sizeof g_fault_text];
  int fd = open(g_fault_file, O_RDONLY | O_CLOEXEC);
  ssize_t size = fd < 0 || fstat(fd, &now) ? -1 : read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  if (size < 0) return;
  text[size] = 0;
  if (now.st_mtim.tv_sec == g_fault_changed.tv_sec && now.st_mtim.tv_nsec == g_fault_changed.tv_nsec &&
      !strcmp(text, g_fault_text))
    return;
  g_fault_changed = now.st_mtim;
  strcpy(g_fault_text, text);
  g_fault_number++;
  set_faults(text);
}

/* Until the file says something else than that which was read as this one. */
static void hold(long number) {
  char held[PATH_MAX];
  snprintf(held, sizeof held, "%s.held", g_fault_file);
  int fd = open(held, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  if (fd >= 0) close(fd);
  for (int same = 1; same;) {
    usleep(1000);
    pthread_mutex_lock(&g_fault_lock);
    read_fault_file();
    same = number == g_fault_number;
    pthread_mutex_unlock(&g_fault_lock);
  }
  unlink(held);
}

static int fault(const char* name) {
  if (!g_fault_count && !g_fault_file) return 0;
  int code = 0;
  pthread_mutex_lock(&g_fault_lock);
  if (g_fault_file) read_fault_file();
  for (int i = 0; i < g_fault_count; i++) {
    struct fault* f = &g_faults[i];
    if (strcmp(f->name, name) && strcmp(f->name, "*")) continue;
    f->calls++;
    if (f->calls == f->at || (f->onwards && f->calls > f->at)) code = f->code;
  }
  long number = g_fault_number;
  pthread_mutex_unlock(&g_fault_lock);
  if (code == CODE_DIE) raise(SIGKILL);
  if (code == CODE_HOLD && g_fault_file) hold(number);
  if (code == CODE_HOLD) return 0;
  while (code == CODE_HANG) pause();
  return code;
}

/* ---- what every call begins with ---- */

struct CUctx_st {
  int device, retained;
};
static struct CUctx_st g_contexts[MAX_DEVICES];
static __thread CUcontext t_context;

#define BEGIN_WITHOUT_CONTEXT                                           \
  do {                                                                  \
    if (!g_pid || g_pid != getpid()) return CUDA_ERROR_NOT_INITIALIZED; \
    int code_ = fault(__func__);                                        \
    if (code_) return code_;                                            \
  } while (0)
#define BEGIN                                          \
  do {                                                 \
    BEGIN_WITHOUT_CONTEXT;                             \
    if (!t_context) return CUDA_ERROR_INVALID_CONTEXT; \
    if (g_sticky) return g_sticky;                     \
  } while (0)

/* ---- memory: own, imported, and the host's that is registered ---- */

enum kind { OWN, IMPORTED, HOST, RESERVED };
typedef struct Piece {
  uintptr_t start;
  size_t size;
  char* alias; /* where the host may touch it */
  int fd, device, opened;
  enum kind kind;
  uint64_t id;
  pid_t owner;
  struct Piece* next;
} Piece;
static Piece* g_pieces;
static pthread_rwlock_t g_memory = PTHREAD_RWLOCK_INITIALIZER;
static _Atomic uint64_t g_next_id = 1;

static size_t whole_pages(size_t size) { return (size + PAGE - 1) & ~(PAGE - 1); }

/* A file says that this process holds an allocation; who died is swept when somebody counts. */
static void note(int device, pid_t owner, uint64_t id, size_t size, const void* by, int held) {
  char path[512];
  snprintf(path, sizeof path, "%s/hold.%d.%d.%llu.%zu.%d.%p", g_dir, device, (int)owner, (unsigned long long)id, size,
           (int)getpid(), by);
  if (!held) {
    unlink(path);
    return;
  }
  int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  if (fd >= 0) close(fd);
}

static void note_hold(const Piece* p, int held) { note(p->device, p->owner, p->id, p->size, p, held); }

static size_t used_bytes(int device) {
  struct {
    int owner;
    unsigned long long id;
  } seen[1024];
  int count = 0;
  size_t used = 0;
  DIR* dir = opendir(g_dir);
  if (!dir) return 0;
  for (struct dirent* e; (e = readdir(dir));) {
    int on, owner, holder, known = 0;
    unsigned long long id;
    size_t size;
    if (sscanf(e->d_name, "hold.%d.%d.%llu.%zu.%d", &on, &owner, &id, &size, &holder) != 5) continue;
    if (kill(holder, 0) && errno == ESRCH) {
      unlinkat(dirfd(dir), e->d_name, 0);
      continue;
    }
    for (int i = 0; i < count; i++) known |= seen[i].owner == owner && seen[i].id == id;
    if (on != device || known) continue;
    if (count < 1024) seen[count].owner = owner, seen[count++].id = id;
    used += size;
  }
  closedir(dir);
  return used;
}

/* ---- memory by chunks: made and shared by themselves, mapped side by side into reserved address space ---- */

typedef struct Chunk {
  int fd, device, exportable, references;
  size_t size;
  uint64_t id;
} Chunk;
typedef struct Map {
  uintptr_t start;
  size_t size;
  int accessible;
  Chunk* chunk;
  struct Map* next;
} Map;
static Map* g_maps; /* under g_memory */

static void let_go(Chunk* c) {
  if (--c->references) return;
  close(c->fd);
  note(c->device, 0, c->id, c->size, c, 0);
  free(c);
}

static Map* find_map(uintptr_t at) {
  for (Map* m = g_maps; m; m = m->next)
    if (at >= m->start && at < m->start + m->size) return m;
  return NULL;
}

/* Whether all of a range is mapped and may be touched. */
static int mapped(uintptr_t at, size_t size) {
  for (uintptr_t end = at + size; at < end;) {
    Map* m = find_map(at);
    if (!m || !m->accessible) return 0;
    at = m->start + m->size;
  }
  return 1;
}

static Piece* find(uintptr_t at) {
  for (Piece* p = g_pieces; p; p = p->next)
    if (at >= p->start && at < p->start + p->size) return p;
  return NULL;
}

static Piece* find_locked(uintptr_t at) {
  pthread_rwlock_rdlock(&g_memory);
  Piece* p = find(at);
  pthread_rwlock_unlock(&g_memory);
  return p;
}

static void add(Piece* p) {
  pthread_rwlock_wrlock(&g_memory);
  p->next = g_pieces;
  g_pieces = p;
  pthread_rwlock_unlock(&g_memory);
}

static void drop(Piece* p) {
  pthread_rwlock_wrlock(&g_memory);
  for (Piece** at = &g_pieces; *at; at = &(*at)->next)
    if (*at == p) {
      *at = p->next;
      break;
    }
  pthread_rwlock_unlock(&g_memory);
  if (p->kind == RESERVED) {
    munmap(p->alias, p->size);
    munmap((void*)p->start, p->size);
  } else if (p->kind != HOST) {
    munmap(p->alias, whole_pages(p->size));
    munmap((void*)p->start, whole_pages(p->size));
    close(p->fd);
    note_hold(p, 0);
  }
  free(p);
}

/* Address space without any access, at a multiple of 2 MiB. */
static uintptr_t reserve(size_t length) {
  size_t align = 2u << 20;
  char* room = mmap(NULL, length + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  uintptr_t start = ((uintptr_t)room + align - 1) & ~(align - 1);
  if (start > (uintptr_t)room) munmap(room, start - (uintptr_t)room);
  munmap((void*)(start + length), (uintptr_t)room + align - start);
  return start;
}

/* By huge pages where the kernel makes them (Linux 6.1): a device's memory is not read through page tables of 4 KiB,
 * and copies would be timed with their cost otherwise. */
static void fill_page_tables(char* at, size_t length) {
  size_t huge = 2u << 20, whole = length & ~(huge - 1);
  for (size_t i = 0; i < whole; i += huge) {
    madvise(at + i, PAGE, MADV_POPULATE_WRITE);
    madvise(at + i, huge, MADV_COLLAPSE);
  }
  madvise(at, length, MADV_POPULATE_WRITE);
}

static Piece* make_piece(size_t size, int device, enum kind kind, int fd, uint64_t id, pid_t owner) {
  size_t length = whole_pages(size);
  char* room = (char*)reserve(length);
  char* alias = mmap(room, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (alias == MAP_FAILED) {
    munmap(room, length);
    return NULL;
  }
  fill_page_tables(alias, length);
  uintptr_t start = reserve(length);
  Piece* p = calloc(1, sizeof *p);
  *p = (Piece){start, size, alias, fd, device, 1, kind, id, owner, NULL};
  note_hold(p, 1);
  add(p);
  return p;
}

/* ---- streams ---- */

typedef struct Work {
  int (*run)(void*);
  void* argument;
  struct Work* next;
} Work;
struct CUstream_st {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  Work *head, *tail;
  uint64_t submitted, done;
  int stop;
  struct CUstream_st* next;
};
static CUstream g_streams;
static pthread_mutex_t g_streams_lock = PTHREAD_MUTEX_INITIALIZER;

static void* run_stream(void* argument) {
  CUstream s = argument;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->head && !s->stop) pthread_cond_wait(&s->changed, &s->lock);
    Work* work = s->head;
    pthread_mutex_unlock(&s->lock);
    if (!work) return NULL;
    if (g_delay_us) usleep(g_delay_us);
    int code = work->run(work->argument);
    if (code) g_sticky = code;
    pthread_mutex_lock(&s->lock);
    s->head = work->next;
    if (!s->head) s->tail = NULL;
    s->done++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    free(work);
  }
}

static CUstream make_stream(void) {
  CUstream s = calloc(1, sizeof *s);
  pthread_t thread;
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  pthread_create(&thread, NULL, run_stream, s);
  pthread_detach(thread);
  pthread_mutex_lock(&g_streams_lock);
  s->next = g_streams;
  g_streams = s;
  pthread_mutex_unlock(&g_streams_lock);
  return s;
}

static CUstream stream_of(CUstream s) {
  static CUstream legacy;
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  if ((uintptr_t)s > 2) return s;
  pthread_mutex_lock(&lock);
  if (!legacy) legacy = make_stream();
  pthread_mutex_unlock(&lock);
  return legacy;
}

static void submit(CUstream s, int (*run)(void*), void* argument) {
  Work* work = malloc(sizeof *work);
  *work = (Work){run, argument, NULL};
  pthread_mutex_lock(&s->lock);
  if (s->tail)
    s->tail->next = work;
  else
    s->head = work;
  s->tail = work;
  s->submitted++;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

static void drain(CUstream s) {
  pthread_mutex_lock(&s->lock);
  for (uint64_t until = s->submitted; s->done < until;) pthread_cond_wait(&s->changed, &s->lock);
  pthread_mutex_unlock(&s->lock);
}

static void drain_all(void) {
  for (CUstream s = g_streams; s; s = s->next) drain(s);
}

/* ---- the driver and its devices ---- */

static void configure(void) {
  g_devices = (int)setting("FAKECUDA_DEVICES", 1);
  g_memory_bytes = (size_t)setting("FAKECUDA_MEM_MB", 256) << 20;
  g_register_max = (size_t)setting("FAKECUDA_HOSTREG_MAX", (long)g_register_max);
  g_delay_us = setting("FAKECUDA_OP_DELAY_US", 0);
  g_driver = (int)setting("FAKECUDA_DRIVER", 13000);
  g_strict = (int)setting("FAKECUDA_STRICT", 0);
  g_no_ipc = (int)setting("FAKECUDA_NO_IPC", 0);
  g_handle_pid = (int)setting("FAKECUDA_HANDLE_PID", 0);
  g_read_only = (int)setting("FAKECUDA_READ_ONLY", 1);
  if (getenv("FAKECUDA_GBPS")) g_gbps = atof(getenv("FAKECUDA_GBPS"));
  if (getenv("FAKECUDA_FAULT")) set_faults(getenv("FAKECUDA_FAULT"));
  g_fault_file = getenv("FAKECUDA_FAULT_FILE");
  const char* dir = getenv("FAKECUDA_DIR");
  if (dir)
    snprintf(g_dir, sizeof g_dir, "%s", dir);
  else
    snprintf(g_dir, sizeof g_dir, "/tmp/fakecuda-%d", (int)getuid());
  mkdir(g_dir, 0700);
  char list[128], *rest = NULL;
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (g_devices > MAX_DEVICES) g_devices = MAX_DEVICES;
  for (int i = 0; !visible && i < g_devices; i++) g_visible[g_visible_count++] = i;
  snprintf(list, sizeof list, "%s", visible ? visible : "");
  for (char* t = strtok_r(list, ",", &rest); t; t = strtok_r(NULL, ",", &rest)) {
    int i = atoi(t);
    if (i < 0 || i >= g_devices || g_visible_count >= MAX_DEVICES) break;
    g_visible[g_visible_count++] = i;
  }
  for (int i = 0; i < MAX_DEVICES; i++) g_contexts[i].device = i;
}

API CUresult cuInit(unsigned flags) {
  (void)flags;
  if (g_pid && g_pid != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  pthread_once(&g_once, configure);
  int code = fault(__func__);
  if (code) return code;
  g_pid = getpid();
  return g_visible_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API CUresult cuDriverGetVersion(int* version) {
  pthread_once(&g_once, configure);
  *version = g_driver;
  return fault(__func__);
}

static int bad_device(CUdevice d) { return d < 0 || d >= g_visible_count; }

API CUresult cuDeviceGetCount(int* count) {
  BEGIN_WITHOUT_CONTEXT;
  *count = g_visible_count;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  BEGIN_WITHOUT_CONTEXT;
  if (bad_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  BEGIN_WITHOUT_CONTEXT;
  if (bad_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, (size_t)size, "fakecuda device %d", g_visible[device]);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char* address, int size, CUdevice device) {
  BEGIN_WITHOUT_CONTEXT;
  if (bad_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(address, (size_t)size, "FFFF:%02X:00.0", g_visible[device]);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  BEGIN_WITHOUT_CONTEXT;
  if (bad_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  memset(uuid, 0, sizeof *uuid);
  memcpy(uuid->bytes, "fakecuda", 8);
  uuid->bytes[15] = (char)g_visible[device];
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  BEGIN_WITHOUT_CONTEXT;
  if (bad_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING   ? 1
           : attribute == CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT ? 3
           : attribute == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID       ? -1
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
           : attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM ? 1
           : attribute == CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED ? g_read_only
                                                                 : 0;
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  BEGIN_WITHOUT_CONTEXT;
  if (bad_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  g_contexts[device].retained++;
  *context = &g_contexts[device];
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
  BEGIN_WITHOUT_CONTEXT;
  t_context = context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
  BEGIN_WITHOUT_CONTEXT;
  *context = t_context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
  BEGIN;
  *device = t_context->device;
  return CUDA_SUCCESS;
}

#define NAME(code) \
  case code:       \
    *name = #code; \
    return CUDA_SUCCESS

API CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    NAME(CUDA_ERROR_INVALID_VALUE);
    NAME(CUDA_ERROR_OUT_OF_MEMORY);
    NAME(CUDA_ERROR_NOT_INITIALIZED);
    NAME(CUDA_ERROR_NO_DEVICE);
    NAME(CUDA_ERROR_INVALID_DEVICE);
    NAME(CUDA_ERROR_INVALID_CONTEXT);
    NAME(CUDA_ERROR_MAP_FAILED);
    NAME(CUDA_ERROR_ILLEGAL_ADDRESS);
    NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    NAME(CUDA_ERROR_NOT_SUPPORTED);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

/* ---- device memory ---- */

API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  BEGIN;
  size_t used = used_bytes(g_visible[t_context->device]);
  *total = g_memory_bytes;
  *free_bytes = used > g_memory_bytes ? 0 : g_memory_bytes - used;
  return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr* at, size_t size) {
  BEGIN;
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  int device = g_visible[t_context->device];
  if (used_bytes(device) + size > g_memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  int fd = memfd_create("fakecuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)whole_pages(size))) return CUDA_ERROR_OUT_OF_MEMORY;
  Piece* p = make_piece(size, device, OWN, fd, g_next_id++, getpid());
  if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(p->alias, 0xA5, size); /* new memory is never zeros */
  *at = p->start;
  return CUDA_SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr at) {
  BEGIN;
  drain_all();
  Piece* p = find_locked(at);
  if (!p || p->start != at || p->kind != OWN) return CUDA_ERROR_INVALID_VALUE;
  drop(p);
  return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr at) {
  BEGIN;
  Piece* p = find_locked(at);
  if (!p || p->kind == HOST) return CUDA_ERROR_NOT_FOUND;
  pthread_rwlock_rdlock(&g_memory);
  Map* m = find_map(at); /* of memory by chunks the chunk */
  if (base) *base = m ? m->start : p->start;
  if (size) *size = m ? m->size : p->size;
  pthread_rwlock_unlock(&g_memory);
  return p->kind == RESERVED && !m ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr at) {
  BEGIN;
  Piece* p = find_locked(at);
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned*)value = p->kind == HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
    *(unsigned*)value = p->kind == OWN;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    for (int i = 0; i < g_visible_count; i++) *(int*)value = g_visible[i] == p->device ? i : *(int*)value;
  else
    return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

/* ---- registered memory of the host ---- */

/* Whether the host may write there. */
static int writable(uintptr_t at) {
  FILE* maps = fopen("/proc/self/maps", "re");
  char line[512], mode[8];
  unsigned long start, end;
  int found = 0;
  while (maps && fgets(line, sizeof line, maps))
    if (sscanf(line, "%lx-%lx %7s", &start, &end, mode) == 3 && at >= start && at < end) found = mode[1] == 'w';
  if (maps) fclose(maps);
  return found;
}

API CUresult cuMemHostRegister_v2(void* at, size_t size, unsigned flags) {
  BEGIN;
  if (!at || !size) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_MEMHOSTREGISTER_READ_ONLY ? !g_read_only : !writable((uintptr_t)at)) return CUDA_ERROR_NOT_SUPPORTED;
  if (size >= g_register_max) return CUDA_ERROR_OUT_OF_MEMORY;
  int overlaps = 0;
  pthread_rwlock_rdlock(&g_memory);
  for (Piece* p = g_pieces; p; p = p->next)
    overlaps |= p->kind == HOST && (uintptr_t)at < p->start + p->size && (uintptr_t)at + size > p->start;
  pthread_rwlock_unlock(&g_memory);
  if (overlaps) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  Piece* p = calloc(1, sizeof *p);
  *p = (Piece){(uintptr_t)at, size, at, -1, -1, 1, HOST, 0, 0, NULL};
  add(p);
  return CUDA_SUCCESS;
}

API CUresult cuMemHostUnregister(void* at) {
  BEGIN;
  drain_all();
  Piece* p = find_locked((uintptr_t)at);
  if (!p || p->kind != HOST || p->start != (uintptr_t)at) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  drop(p);
  return CUDA_SUCCESS;
}

/* ---- copies ---- */

typedef struct {
  uintptr_t to, from;
  size_t size;
} Copy;
typedef struct {
  size_t count;
  Copy copies[];
} Copies;

/* Where the host may touch a range. NULL: it is none of ours, so plain memory. *bad: it leaves its piece. */
static char* translate(uintptr_t at, size_t size, int* bad) {
  Piece* p = find(at);
  if (!p) return NULL;
  if (at + size > p->start + p->size || (p->kind == RESERVED && !mapped(at, size))) *bad = 1;
  return p->alias + (at - p->start);
}

/* With the memory's lock. */
static int copy_now(const Copy* c) {
  int bad = 0;
  char *to = translate(c->to, c->size, &bad), *from = translate(c->from, c->size, &bad);
  /* Neither side is ours: it was freed since it was submitted. */
  if (bad || (!to && !from)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  memcpy(to ? to : (char*)c->to, from ? from : (char*)c->from, c->size);
  return CUDA_SUCCESS;
}

static void take_time(size_t size) {
  double seconds = (double)size / (g_gbps * 1e9);
  struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  nanosleep(&t, NULL);
}

static int run_copies(void* argument) {
  Copies* copies = argument;
  int code = 0;
  /* One by one where something may happen to each; else the lock would cost more than a small copy. */
  size_t step = g_gbps > 0 || g_fault_count || g_fault_file ? 1 : 64;
  for (size_t i = 0; i < copies->count && !code && !g_sticky; i += step) {
    size_t end = i + step < copies->count ? i + step : copies->count;
    if (step == 1) code = fault("copy");
    pthread_rwlock_rdlock(&g_memory);
    for (size_t k = i; k < end && !code; k++) code = copy_now(&copies->copies[k]);
    pthread_rwlock_unlock(&g_memory);
    if (g_gbps > 0) take_time(copies->copies[i].size);
  }
  free(copies);
  return code;
}

/* Whether a side is memory that a copy may have: 0, 1 where it is not registered, else an error. With the lock. */
static int side(uintptr_t at, size_t size) {
  int bad = 0;
  char* found = translate(at, size, &bad);
  return bad ? 2 : !found;
}

static CUresult copy_all(const CUdeviceptr* to, const CUdeviceptr* from, const size_t* sizes, size_t count,
                         CUstream stream, int synchronous) {
  Copies* copies = malloc(sizeof *copies + count * sizeof *copies->copies);
  copies->count = count;
  int strict = g_strict && !synchronous; /* a synchronous copy of plain memory is what such a call is for */
  int wrong = 0;
  pthread_rwlock_rdlock(&g_memory);
  for (size_t i = 0; i < count && !wrong; i++) {
    int a = side(to[i], sizes[i]), b = side(from[i], sizes[i]);
    wrong = a > 1 || b > 1 || (a && b) || !sizes[i] || (strict && (a || b));
    synchronous |= a || b;
    copies->copies[i] = (Copy){to[i], from[i], sizes[i]};
  }
  pthread_rwlock_unlock(&g_memory);
  if (wrong) {
    free(copies);
    return CUDA_ERROR_INVALID_VALUE;
  }
  submit(stream, run_copies, copies);
  if (!synchronous) return CUDA_SUCCESS; /* how it ends is told by later calls, however fast the stream is */
  drain(stream);
  return g_sticky;
}

static CUresult copy_one(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream, int synchronous) {
  return size ? copy_all(&to, &from, &size, 1, stream_of(stream), synchronous) : CUDA_SUCCESS;
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
  BEGIN;
  return copy_one(to, (uintptr_t)from, size, stream, 0);
}

API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, CUstream stream) {
  BEGIN;
  return copy_one((uintptr_t)to, from, size, stream, 0);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
  BEGIN;
  return copy_one(to, (uintptr_t)from, size, NULL, 1);
}

API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
  BEGIN;
  return copy_one((uintptr_t)to, from, size, NULL, 1);
}

static CUresult batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count, CUmemcpyAttributes* attributes,
                      size_t* starts, size_t attribute_count, CUstream stream) {
  /* The real driver refuses the default stream, too. */
  if ((uintptr_t)stream <= 2 || !count || !to || !from || !sizes) return CUDA_ERROR_INVALID_VALUE;
  if (attribute_count && (!attributes || !starts || starts[0])) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 1; i < attribute_count; i++)
    if (starts[i] <= starts[i - 1] || starts[i] >= count) return CUDA_ERROR_INVALID_VALUE;
  return copy_all(to, from, sizes, count, stream, 0);
}

API CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                CUmemcpyAttributes* attributes, size_t* starts, size_t attribute_count, size_t* failed,
                                CUstream stream) {
  BEGIN;
  if (!failed) return CUDA_ERROR_INVALID_VALUE;
  return batch(to, from, sizes, count, attributes, starts, attribute_count, stream);
}

API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                   CUmemcpyAttributes* attributes, size_t* starts, size_t attribute_count,
                                   CUstream stream) {
  BEGIN;
  return batch(to, from, sizes, count, attributes, starts, attribute_count, stream);
}

/* ---- streams and events ---- */

API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  BEGIN;
  (void)flags;
  *stream = make_stream();
  return CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream stream) {
  BEGIN;
  drain(stream_of(stream));
  return g_sticky;
}

struct CUevent_st {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t recorded, reached;
};

static int reach(void* argument) {
  CUevent event = argument;
  pthread_mutex_lock(&event->lock);
  event->reached++;
  pthread_cond_broadcast(&event->changed);
  pthread_mutex_unlock(&event->lock);
  return 0;
}

API CUresult cuEventCreate(CUevent* event, unsigned flags) {
  BEGIN;
  (void)flags;
  CUevent made = calloc(1, sizeof *made);
  pthread_mutex_init(&made->lock, NULL);
  pthread_cond_init(&made->changed, NULL);
  *event = made;
  return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
  BEGIN;
  pthread_mutex_lock(&event->lock);
  event->recorded++;
  pthread_mutex_unlock(&event->lock);
  submit(stream_of(stream), reach, event);
  return CUDA_SUCCESS;
}

API CUresult cuEventQuery(CUevent event) {
  BEGIN;
  pthread_mutex_lock(&event->lock);
  int waits = event->reached < event->recorded;
  pthread_mutex_unlock(&event->lock);
  return waits ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

typedef struct {
  CUhostFn function;
  void* argument;
} HostCall;

static int call_host(void* argument) {
  HostCall call = *(HostCall*)argument;
  free(argument);
  if (!g_sticky) call.function(call.argument); /* as the real one: not once the context is lost */
  return 0;
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  BEGIN;
  if (!function) return CUDA_ERROR_INVALID_VALUE;
  HostCall* call = malloc(sizeof *call);
  *call = (HostCall){function, argument};
  submit(stream_of(stream), call_host, call);
  return CUDA_SUCCESS;
}

/* ---- sharing between processes ---- */

typedef struct {
  uint64_t magic, id, size, started;
  int32_t pid, fd, device, unused;
} Handle;

/* When a process started, in clock ticks; 0 where there is none that lives. */
static uint64_t started(pid_t pid) {
  char path[64], text[1024], state = 0;
  unsigned long long ticks = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  if (size <= 0) return 0;
  text[size] = 0;
  char* at = strrchr(text, ')');
  if (!at || sscanf(at + 2, "%c", &state) != 1 || state == 'Z') return 0;
  at += 2;
  for (int i = 0; i < 19 && at; i++) at = (at = strchr(at, ' ')) ? at + 1 : NULL;
  return at && sscanf(at, "%llu", &ticks) == 1 ? ticks : 0;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr at) {
  BEGIN;
  Piece* p = find_locked(at);
  if (!p || p->kind != OWN) return CUDA_ERROR_INVALID_VALUE;
  if (g_no_ipc) return CUDA_ERROR_NOT_SUPPORTED;
  pid_t pid = g_handle_pid ? g_handle_pid : getpid();
  Handle h = {HANDLE_MAGIC, p->id, p->size, started(getpid()), pid, p->fd, p->device, 0};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &h, sizeof h);
  return CUDA_SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* at, CUipcMemHandle handle, unsigned flags) {
  BEGIN;
  Handle h;
  if (g_no_ipc) return CUDA_ERROR_NOT_SUPPORTED;
  memcpy(&h, &handle, sizeof h);
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || h.magic != HANDLE_MAGIC) return CUDA_ERROR_INVALID_VALUE;
  if (h.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  for (Piece* p = g_pieces; p; p = p->next)
    if (p->kind == IMPORTED && p->id == h.id && p->owner == h.pid) {
      p->opened++;
      *at = p->start;
      return CUDA_SUCCESS;
    }
  if (!h.started || started(h.pid) != h.started) return CUDA_ERROR_INVALID_VALUE;
  int visible = 0;
  for (int i = 0; i < g_visible_count; i++) visible |= g_visible[i] == h.device;
  if (!visible) return CUDA_ERROR_INVALID_DEVICE;
  char path[64];
  struct stat found;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return errno == EACCES || errno == EPERM ? CUDA_ERROR_MAP_FAILED : CUDA_ERROR_INVALID_VALUE;
  if (fstat(fd, &found) || (uint64_t)found.st_size < h.size) {
    close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  Piece* p = make_piece(h.size, h.device, IMPORTED, fd, h.id, h.pid);
  if (!p) return CUDA_ERROR_MAP_FAILED;
  *at = p->start;
  return CUDA_SUCCESS;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  BEGIN;
  drain_all();
  Piece* p = find_locked(at);
  if (!p || p->kind != IMPORTED || p->start != at) return CUDA_ERROR_INVALID_VALUE;
  if (!--p->opened) drop(p);
  return CUDA_SUCCESS;
}

/* ---- memory by chunks ---- */

#define GRAIN (2ull << 20)

API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* wanted,
                         unsigned long long flags) {
  BEGIN;
  (void)flags;
  if (!size || size % GRAIN || bad_device(wanted->location.id)) return CUDA_ERROR_INVALID_VALUE;
  int device = g_visible[wanted->location.id];
  if (used_bytes(device) + size > g_memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  char name[32];
  struct stat made;
  snprintf(name, sizeof name, "fakecuda-chunk.%d", device);
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size) || fstat(fd, &made)) return CUDA_ERROR_OUT_OF_MEMORY;
  Chunk* c = calloc(1, sizeof *c);
  *c = (Chunk){fd, device, wanted->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1, size, made.st_ino};
  note(device, 0, c->id, size, c, 1);
  *handle = (uintptr_t)c;
  return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  BEGIN;
  let_go((Chunk*)(uintptr_t)handle);
  return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr* at, size_t size, size_t align, CUdeviceptr wanted,
                                 unsigned long long flags) {
  BEGIN;
  (void)align, (void)wanted, (void)flags;
  if (!size || size % GRAIN) return CUDA_ERROR_INVALID_VALUE;
  Piece* p = calloc(1, sizeof *p);
  *p = (Piece){reserve(size), size, (char*)reserve(size), -1, g_visible[t_context->device], 1, RESERVED, 0, 0, NULL};
  add(p);
  *at = p->start;
  return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  BEGIN;
  Piece* p = find_locked(at);
  if (!p || p->kind != RESERVED || p->start != at || p->size != size) return CUDA_ERROR_INVALID_VALUE;
  for (uintptr_t inside = at; inside < at + size; inside += GRAIN)
    if (find_map(inside)) return CUDA_ERROR_INVALID_VALUE; /* still in use */
  drop(p);
  return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
  BEGIN;
  (void)flags;
  Chunk* c = (Chunk*)(uintptr_t)handle;
  Piece* p = find_locked(at);
  if (!p || p->kind != RESERVED || offset || size != c->size || at + size > p->start + p->size || find_map(at))
    return CUDA_ERROR_INVALID_VALUE;
  char* alias = p->alias + (at - p->start);
  if (mmap(alias, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, c->fd, 0) == MAP_FAILED)
    return CUDA_ERROR_MAP_FAILED;
  Map* m = calloc(1, sizeof *m);
  pthread_rwlock_wrlock(&g_memory);
  *m = (Map){at, size, 0, c, g_maps};
  g_maps = m;
  c->references++;
  p->device = c->device;
  pthread_rwlock_unlock(&g_memory);
  return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  BEGIN;
  drain_all();
  Piece* p = find_locked(at);
  if (!p || p->kind != RESERVED || at + size > p->start + p->size) return CUDA_ERROR_INVALID_VALUE;
  pthread_rwlock_wrlock(&g_memory);
  for (Map** m = &g_maps; *m;) {
    Map* found = *m;
    if (found->start < at || found->start >= at + size) {
      m = &found->next;
      continue;
    }
    *m = found->next;
    let_go(found->chunk);
    free(found);
  }
  mmap(p->alias + (at - p->start), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  pthread_rwlock_unlock(&g_memory);
  return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc* wanted, size_t count) {
  BEGIN;
  if (count != 1 || wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || bad_device(wanted->location.id))
    return CUDA_ERROR_INVALID_VALUE;
  pthread_rwlock_wrlock(&g_memory);
  for (Map* m = g_maps; m; m = m->next)
    if (m->start >= at && m->start < at + size) m->accessible = 1;
  pthread_rwlock_unlock(&g_memory);
  return CUDA_SUCCESS;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* at) {
  BEGIN;
  Map* m = find_map((uintptr_t)at);
  if (!m) return CUDA_ERROR_INVALID_VALUE;
  m->chunk->references++;
  *handle = (uintptr_t)m->chunk;
  return CUDA_SUCCESS;
}

API CUresult cuMemExportToShareableHandle(void* made, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags) {
  BEGIN;
  (void)flags;
  Chunk* c = (Chunk*)(uintptr_t)handle;
  if (!c->exportable || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  *(int*)made = fcntl(c->fd, F_DUPFD_CLOEXEC, 3);
  return CUDA_SUCCESS;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* given, int type) {
  BEGIN;
  char path[64], name[64] = "";
  struct stat found;
  int device;
  snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(uintptr_t)given);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || readlink(path, name, sizeof name - 1) < 0 ||
      sscanf(name, "/memfd:fakecuda-chunk.%d", &device) != 1)
    return CUDA_ERROR_INVALID_VALUE;
  int fd = fcntl((int)(uintptr_t)given, F_DUPFD_CLOEXEC, 3);
  if (fd < 0 || fstat(fd, &found)) return CUDA_ERROR_INVALID_VALUE;
  Chunk* c = calloc(1, sizeof *c);
  *c = (Chunk){fd, device, 1, 1, (size_t)found.st_size, found.st_ino};
  note(device, 0, c->id, c->size, c, 1);
  *handle = (uintptr_t)c;
  return CUDA_SUCCESS;
}

/* ---- kernels, run on the CPU in their stream ---- */

struct CUfunc_st {
  void (*run)(unsigned blocks, unsigned threads, uint64_t* arguments);
};
typedef struct {
  CUfunction function;
  unsigned blocks, threads;
  uint64_t arguments[4];
} Launch;

/* For kernels: where the host may touch what they point to. */
API void* fakecuda_alias(uint64_t at) {
  Piece* p = find(at);
  return p ? p->alias + (at - p->start) : (void*)at;
}

static int run_launch(void* argument) {
  Launch* launch = argument;
  pthread_rwlock_rdlock(&g_memory);
  launch->function->run(launch->blocks, launch->threads, launch->arguments);
  pthread_rwlock_unlock(&g_memory);
  free(launch);
  return fault("copy");
}

API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  BEGIN;
  (void)image;
  const char* path = getenv("FAKECUDA_KERNELS");
  *module = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  return *module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  BEGIN;
  char symbol[128];
  snprintf(symbol, sizeof symbol, "%s_on_cpu", name);
  void* found = dlsym(module, symbol);
  if (!found) return CUDA_ERROR_NOT_FOUND;
  *function = calloc(1, sizeof **function);
  *(void**)&(*function)->run = found;
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty,
                            unsigned tz, unsigned shared, CUstream stream, void** arguments, void** extra) {
  BEGIN;
  if (!blocks || threads > 1024 || y != 1 || z != 1 || ty != 1 || tz != 1 || shared || extra)
    return CUDA_ERROR_INVALID_VALUE;
  Launch* launch = malloc(sizeof *launch);
  *launch = (Launch){function, blocks, threads, {0}};
  for (int i = 0; i < 4; i++) memcpy(&launch->arguments[i], arguments[i], 8);
  submit(stream_of(stream), run_launch, launch);
  return CUDA_SUCCESS;
}

/* ---- finding functions ---- */

#define ENTRY(name, version, function) {name, version, (void*)function}
static const struct {
  const char* name;
  int version;
  void* function;
} TABLE[] = {
    ENTRY("cuInit", 2000, cuInit),
    ENTRY("cuDriverGetVersion", 2020, cuDriverGetVersion),
    ENTRY("cuDeviceGetCount", 2000, cuDeviceGetCount),
    ENTRY("cuDeviceGet", 2000, cuDeviceGet),
    ENTRY("cuDeviceGetName", 2000, cuDeviceGetName),
    ENTRY("cuDeviceGetPCIBusId", 4010, cuDeviceGetPCIBusId),
    ENTRY("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2),
    ENTRY("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute),
    ENTRY("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain),
    ENTRY("cuCtxSetCurrent", 4000, cuCtxSetCurrent),
    ENTRY("cuCtxGetCurrent", 4000, cuCtxGetCurrent),
    ENTRY("cuCtxGetDevice", 2000, cuCtxGetDevice),
    ENTRY("cuGetErrorName", 6000, cuGetErrorName),
    ENTRY("cuMemGetInfo", 3020, cuMemGetInfo_v2),
    ENTRY("cuMemAlloc", 3020, cuMemAlloc_v2),
    ENTRY("cuMemFree", 3020, cuMemFree_v2),
    ENTRY("cuMemGetAddressRange", 3020, cuMemGetAddressRange_v2),
    ENTRY("cuPointerGetAttribute", 4000, cuPointerGetAttribute),
    ENTRY("cuMemHostRegister", 6050, cuMemHostRegister_v2),
    ENTRY("cuMemHostUnregister", 4000, cuMemHostUnregister),
    ENTRY("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2),
    ENTRY("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2),
    ENTRY("cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2),
    ENTRY("cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2),
    ENTRY("cuMemcpyBatchAsync", 12080, cuMemcpyBatchAsync),
    ENTRY("cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2),
    ENTRY("cuStreamCreate", 2000, cuStreamCreate),
    ENTRY("cuStreamSynchronize", 2000, cuStreamSynchronize),
    ENTRY("cuEventCreate", 2000, cuEventCreate),
    ENTRY("cuEventRecord", 2000, cuEventRecord),
    ENTRY("cuEventQuery", 2000, cuEventQuery),
    ENTRY("cuLaunchHostFunc", 10000, cuLaunchHostFunc),
    ENTRY("cuIpcGetMemHandle", 4010, cuIpcGetMemHandle),
    ENTRY("cuIpcOpenMemHandle", 11000, cuIpcOpenMemHandle_v2),
    ENTRY("cuIpcCloseMemHandle", 4010, cuIpcCloseMemHandle),
    ENTRY("cuModuleLoadData", 2000, cuModuleLoadData),
    ENTRY("cuModuleGetFunction", 2000, cuModuleGetFunction),
    ENTRY("cuLaunchKernel", 4000, cuLaunchKernel),
    ENTRY("cuMemCreate", 10020, cuMemCreate),
    ENTRY("cuMemRelease", 10020, cuMemRelease),
    ENTRY("cuMemAddressReserve", 10020, cuMemAddressReserve),
    ENTRY("cuMemAddressFree", 10020, cuMemAddressFree),
    ENTRY("cuMemMap", 10020, cuMemMap),
    ENTRY("cuMemUnmap", 10020, cuMemUnmap),
    ENTRY("cuMemSetAccess", 10020, cuMemSetAccess),
    ENTRY("cuMemRetainAllocationHandle", 11000, cuMemRetainAllocationHandle),
    ENTRY("cuMemExportToShareableHandle", 10020, cuMemExportToShareableHandle),
    ENTRY("cuMemImportFromShareableHandle", 10020, cuMemImportFromShareableHandle),
};

/* The newest function of this name that both the caller and the driver know. */
API CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  (void)flags;
  int driver, best = -1, known = 0;
  cuDriverGetVersion(&driver);
  *function = NULL;
  for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++) {
    if (strcmp(TABLE[i].name, name)) continue;
    known = 1;
    if (TABLE[i].version > version || TABLE[i].version > driver || TABLE[i].version <= best) continue;
    best = TABLE[i].version;
    *function = TABLE[i].function;
  }
  if (status) *status = *function ? 0 : known ? 2 : 1;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
