/* fake_nvml.c - a stand-in for libnvidia-ml.so.1, enough for pynvml 13.x.
 *   cc -shared -fPIC -O1 -Wall -o DIR/libnvidia-ml.so.1 fake_nvml.c -lpthread
 *   LD_LIBRARY_PATH=DIR FAKE_NVML_FILE=/path/conf python ...
 * The file is read again on every call: replace it by rename(2).
 * Lines (blank and # lines skipped; key=value fields split on blanks; name= is last, takes the rest):
 *   driver 570.124.06
 *   init 0                      nvmlReturn_t of nvmlInitWithFlags (9: driver not loaded)
 *   gpu uuid=GPU-.. pci=00000000:3B:00.0 mem=BYTES used=BYTES util=% memutil=% temp=C power=mW
 *       numa=N (memory affinity) numaid=N (GetNumaNodeId; -1 = not supported, as on x86)
 *       lost=0|1|2 (1: all calls 15; 2: handle look-up works, calls 15) mig=-1|0|1 maxmig=N
 *       recovery=N (-1: field not supported, else minus the field's nvmlReturn_t) events=MASK minor=N mode=N (compute mode) cc=90 (capability)
 *       remap=N (-1: not supported, 1: rows wait for a reset, 2: it failed) fabric=N (state; -1: not supported)
 *       bridge=N (host bridge; GPUs of one have it as common ancestor, others the system) name=...
 *   link gpu=0 to=1                NVLink, or an NVSwitch, joins the two
 *   mig gpu=0 idx=0 uuid=MIG-.. gi=1 ci=0 gslices=1 cslices=1 mem_mb=9984 used=BYTES sm=16 name=...
 *   xid id=1 gpu=0 code=79 gi=4294967295 ci=4294967295    an id above those of the event set's creation is delivered once
 *   proc gpu=0 mig=-1 pid=N mem=BYTES (-1: not available)   a process that computes, on a GPU or its idx-th part
 *   fail nvmlDeviceGetPowerUsage 3 [gpu [idx]]            this function gives this nvmlReturn_t, for a GPU or its idx-th part
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINIT = 1, INVAL = 2, NOTSUP = 3, NOTFOUND = 6, TOOSMALL = 7, NODRIVER = 9, TIMEOUT = 10, LOST = 15,
       VERSION = 25 };
#define MAXGPU 32
#define MAXMIG 64
#define MAXXID 64
#define MAXFAIL 32
#define MAXPROC 64
#define MAXLINK 128
#define NOID 0xFFFFFFFFu

typedef struct { char uuid[96], name[96], pci[32]; unsigned long long mem, used, events;
                 int util, memutil, temp, power, numa, numaid, lost, mig, maxmig, recovery, minor, mode, cc, bridge, remap, fabric; } gpu_t;
typedef struct { char uuid[96], name[96]; int gpu, idx; unsigned gi, ci, gslices, cslices, sm;
                 unsigned long long mem_mb, used; } mig_t;
typedef struct { unsigned long long id, code; int gpu; unsigned gi, ci; } xid_t;
typedef struct { char fn[64]; int code, gpu, idx; } fail_t;
typedef struct { int gpu, mig; unsigned pid; unsigned long long mem; } proc_t;
typedef struct { int gpu, to; } link_t;
typedef struct { char driver[80]; int init, ng, nm, nx, nf, np, nl; link_t l[MAXLINK]; proc_t p[MAXPROC]; gpu_t g[MAXGPU]; mig_t m[MAXMIG]; xid_t x[MAXXID];
                 fail_t f[MAXFAIL]; } conf_t;

/* --- struct layouts as pynvml's ctypes declares them (x86-64 sizes) --- */
typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } pci_t; /* 68 */
typedef struct { unsigned long long total, free, used; } mem1_t;                                       /* 24 */
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } mem2_t;           /* 40 */
typedef struct { unsigned gpu, memory; } util_t;                                                       /*  8 */
typedef struct { unsigned version, sensor; int temperature; } temp1_t;                                 /* 12 */
typedef struct { unsigned sm, ce, dec, enc, jpeg, ofa, gslices, cslices; unsigned long long memMB; } attr_t; /* 40 */
typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } val_t;
typedef struct { unsigned fieldId, scopeId; long long timestamp, latencyUsec; unsigned valueType; int nvmlReturn; val_t value; } field_t; /* 40 */
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_t;              /* 32 */
_Static_assert(sizeof(pci_t) == 68 && sizeof(mem1_t) == 24 && sizeof(mem2_t) == 40 && sizeof(attr_t) == 40, "layout");
_Static_assert(sizeof(field_t) == 40 && sizeof(event_t) == 32 && sizeof(temp1_t) == 12, "layout");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int inits;
static char gh[MAXGPU], mh[MAXMIG];                     /* a handle is an address in one of these */
typedef struct { unsigned long long mask[MAXGPU], last; } set_t;

static const char *field(const char *line, const char *key)      /* value after " key=" */
{
    size_t n = strlen(key);
    for (const char *p = line; (p = strstr(p, key)); p += n)
        if (p > line && (p[-1] == ' ' || p[-1] == '\t') && p[n] == '=') return p + n + 1;
    return NULL;
}
static void str(const char *l, const char *k, char *out, size_t n, int rest)
{
    const char *v = field(l, k);
    if (!v) return;
    size_t len = strcspn(v, rest ? "\r\n" : " \t\r\n");
    if (len >= n) len = n - 1;
    memcpy(out, v, len); out[len] = 0;
}
static long long num(const char *l, const char *k, long long dflt)
{
    const char *v = field(l, k);
    return v ? strtoll(v, NULL, 0) : dflt;
}
static int load(conf_t *c)
{
    char l[1024];
    const char *path = getenv("FAKE_NVML_FILE");
    FILE *f = path ? fopen(path, "re") : NULL;
    memset(c, 0, sizeof *c);
    strcpy(c->driver, "570.00");
    if (!f) { c->init = NODRIVER; return NODRIVER; }
    while (fgets(l, sizeof l, f)) {
        if (!strncmp(l, "driver ", 7)) sscanf(l + 7, "%79s", c->driver);
        else if (!strncmp(l, "init ", 5)) c->init = atoi(l + 5);
        else if (!strncmp(l, "gpu ", 4) && c->ng < MAXGPU) {
            gpu_t *g = &c->g[c->ng];
            snprintf(g->uuid, sizeof g->uuid, "GPU-00000000-0000-0000-0000-%012d", c->ng);
            snprintf(g->pci, sizeof g->pci, "00000000:%02X:00.0", c->ng + 1);
            strcpy(g->name, "Fake GPU");
            str(l, "uuid", g->uuid, sizeof g->uuid, 0); str(l, "pci", g->pci, sizeof g->pci, 0); str(l, "name", g->name, sizeof g->name, 1);
            g->mem = num(l, "mem", 85899345920LL); g->used = num(l, "used", 0); g->events = num(l, "events", 0x1f);
            g->util = num(l, "util", 0); g->memutil = num(l, "memutil", 0); g->temp = num(l, "temp", 40); g->power = num(l, "power", 100000);
            g->numa = num(l, "numa", 0); g->numaid = num(l, "numaid", -1); g->lost = num(l, "lost", 0); g->mig = num(l, "mig", -1);
            g->maxmig = num(l, "maxmig", g->mig < 0 ? 0 : 7); g->recovery = num(l, "recovery", 0); g->minor = num(l, "minor", c->ng);
            g->mode = num(l, "mode", 0); g->cc = num(l, "cc", 90); g->bridge = num(l, "bridge", c->ng);
            g->remap = num(l, "remap", -1); g->fabric = num(l, "fabric", -1);
            c->ng++;
        } else if (!strncmp(l, "mig ", 4) && c->nm < MAXMIG) {
            mig_t *m = &c->m[c->nm++];
            str(l, "uuid", m->uuid, sizeof m->uuid, 0); str(l, "name", m->name, sizeof m->name, 1);
            m->gpu = num(l, "gpu", 0); m->idx = num(l, "idx", 0); m->gi = num(l, "gi", 1); m->ci = num(l, "ci", 0);
            m->gslices = num(l, "gslices", 1); m->cslices = num(l, "cslices", m->gslices); m->sm = num(l, "sm", 16);
            m->mem_mb = num(l, "mem_mb", 9984); m->used = num(l, "used", 0);
        } else if (!strncmp(l, "xid ", 4) && c->nx < MAXXID) {
            xid_t *x = &c->x[c->nx++];
            x->id = num(l, "id", c->nx); x->code = num(l, "code", 79); x->gpu = num(l, "gpu", 0);
            x->gi = num(l, "gi", NOID); x->ci = num(l, "ci", NOID);
        } else if (!strncmp(l, "link ", 5) && c->nl < MAXLINK) {
            link_t *k = &c->l[c->nl++];
            k->gpu = num(l, "gpu", 0); k->to = num(l, "to", 0);
        } else if (!strncmp(l, "proc ", 5) && c->np < MAXPROC) {
            proc_t *p = &c->p[c->np++];
            p->gpu = num(l, "gpu", 0); p->mig = num(l, "mig", -1); p->pid = num(l, "pid", 1); p->mem = num(l, "mem", -1);
        } else if (!strncmp(l, "fail ", 5) && c->nf < MAXFAIL) {
            fail_t *x = &c->f[c->nf]; x->gpu = x->idx = -1;
            if (sscanf(l + 5, "%63s %d %d %d", x->fn, &x->code, &x->gpu, &x->idx) >= 2) c->nf++;
        }
    }
    fclose(f);
    return OK;
}
/* what the file says this function gives for a GPU (-1: none) and its idx-th part (-1: the GPU itself) */
static int failing(conf_t *c, const char *fn, int gpu, int idx)
{
    for (int k = 0; k < c->nf; k++) {
        fail_t *f = &c->f[k];
        if (!strcmp(f->fn, fn) && (f->gpu < 0 || f->gpu == gpu) && (f->idx < 0 || f->idx == idx)) return f->code;
    }
    return OK;
}
/* load, check init, find what the handle means: *g always, *m NULL for a whole GPU */
static int dev(conf_t *c, const char *fn, void *h, gpu_t **g, mig_t **m)
{
    int i;
    load(c);
    pthread_mutex_lock(&lock); i = inits; pthread_mutex_unlock(&lock);
    if (!i) return UNINIT;
    *m = NULL;
    if ((char *)h >= gh && (char *)h < gh + c->ng) i = (int)((char *)h - gh);
    else if ((char *)h >= mh && (char *)h < mh + c->nm) { *m = &c->m[(char *)h - mh]; i = (*m)->gpu; }
    else return INVAL;
    if (i < 0 || i >= c->ng) return INVAL;
    *g = &c->g[i];
    if ((i = failing(c, fn, i, *m ? (*m)->idx : -1))) return i;
    return (*g)->lost ? LOST : OK;
}
static int sys(conf_t *c, const char *fn)
{
    int i;
    load(c);
    pthread_mutex_lock(&lock); i = inits; pthread_mutex_unlock(&lock);
    if (!i) return UNINIT;
    return failing(c, fn, -1, -1);
}
static int put(char *out, unsigned n, const char *s) { if (strlen(s) >= n) return TOOSMALL; strcpy(out, s); return OK; }
#define DEV(h) conf_t c; gpu_t *g; mig_t *m; int r = dev(&c, __func__, h, &g, &m); (void)g; (void)m; if (r) return r
#define SYS    conf_t c; int r = sys(&c, __func__); if (r) return r
#define WHOLE  if (m) return INVAL
#define PART   if (!m) return INVAL

int nvmlInitWithFlags(unsigned flags)
{
    conf_t c; (void)flags;
    load(&c);
    if (c.init) return c.init;
    pthread_mutex_lock(&lock); inits++; pthread_mutex_unlock(&lock);
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
/* As in the real one (seen with driver 580): a shutdown, and the end of a set, wait for a wait to end. */
static pthread_rwlock_t waits = PTHREAD_RWLOCK_INITIALIZER;
int nvmlShutdown(void)
{
    int r = OK;
    pthread_rwlock_wrlock(&waits); pthread_rwlock_unlock(&waits);
    pthread_mutex_lock(&lock); if (inits) inits--; else r = UNINIT; pthread_mutex_unlock(&lock);
    return r;
}
const char *nvmlErrorString(int r) { return r == 30 ? "Reset type not supported" : r == OK ? "Success" : "Fake NVML error"; }
int nvmlSystemGetDriverVersion(char *o, unsigned n) { SYS; return put(o, n, c.driver); }
int nvmlSystemGetNVMLVersion(char *o, unsigned n) { SYS; return put(o, n, c.driver); }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { SYS; *v = 12080; return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { SYS; *n = c.ng; return OK; }

static int found(conf_t *c, int i, void **h) { if (i < 0) return NOTFOUND; *h = &gh[i]; return c->g[i].lost == 1 ? LOST : OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) 
{
    SYS;
    if (i >= (unsigned)c.ng) return INVAL;
    return (r = failing(&c, __func__, i, -1)) ? r : found(&c, i, h);
}
int nvmlDeviceGetHandleByUUID(const char *u, void **h)
{
    SYS;
    for (int i = 0; i < c.ng; i++) if (!strcmp(c.g[i].uuid, u)) return found(&c, i, h);
    for (int i = 0; i < c.nm; i++) if (!strcmp(c.m[i].uuid, u)) { *h = &mh[i]; return OK; }
    return NOTFOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *p, void **h)
{
    SYS;
    for (int i = 0; i < c.ng; i++) {
        size_t a = strlen(c.g[i].pci), b = strlen(p);
        if (b <= a && b && !strcasecmp(c.g[i].pci + a - b, p)) return found(&c, i, h);
    }
    return NOTFOUND;
}
int nvmlDeviceGetIndex(void *h, unsigned *i) { DEV(h); *i = m ? (unsigned)m->idx : (unsigned)(g - c.g); return OK; }
int nvmlDeviceGetComputeMode(void *h, unsigned *o) { DEV(h); *o = g->mode; return OK; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { DEV(h); *major = g->cc / 10; *minor = g->cc % 10; return OK; }
int nvmlDeviceGetMinorNumber(void *h, unsigned *n) { DEV(h); WHOLE; *n = g->minor; return OK; }
int nvmlDeviceGetName(void *h, char *o, unsigned n) { DEV(h); return put(o, n, m && m->name[0] ? m->name : g->name); }
int nvmlDeviceGetUUID(void *h, char *o, unsigned n) { DEV(h); return put(o, n, m ? m->uuid : g->uuid); }
int nvmlDeviceGetPciInfo_v3(void *h, pci_t *p)
{
    DEV(h); WHOLE;
    unsigned dom = 0, bus = 0, d = 0, fn = 0;
    if (sscanf(g->pci, "%x:%x:%x.%x", &dom, &bus, &d, &fn) < 3) return 999;
    memset(p, 0, sizeof *p);
    p->domain = dom; p->bus = bus; p->device = d; p->pciDeviceId = 0x233010DE; p->pciSubSystemId = 0x16C110DE;
    snprintf(p->busId, sizeof p->busId, "%08X:%02X:%02X.%X", dom, bus & 0xff, d & 0x1f, fn & 7);
    snprintf(p->busIdLegacy, sizeof p->busIdLegacy, "%04X:%02X:%02X.%X", dom & 0xffff, bus & 0xff, d & 0x1f, fn & 7);
    return OK;
}
static void meminfo(gpu_t *g, mig_t *m, unsigned long long *t, unsigned long long *u)
{
    *t = m ? m->mem_mb << 20 : g->mem; *u = m ? m->used : g->used;
    if (*u > *t) *u = *t;
}
int nvmlDeviceGetMemoryInfo(void *h, mem1_t *o)
{
    DEV(h);
    meminfo(g, m, &o->total, &o->used); o->free = o->total - o->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, mem2_t *o)
{
    DEV(h);
    if (o->version != 0x02000028) return VERSION;
    meminfo(g, m, &o->total, &o->used); o->reserved = 0; o->free = o->total - o->used;
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *h, util_t *o)
{
    DEV(h);
    if (m || g->mig == 1) return NOTSUP;                /* the real one gives this while MIG is on */
    o->gpu = g->util; o->memory = g->memutil;
    return OK;
}
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *t) { DEV(h); WHOLE; if (sensor) return INVAL; *t = g->temp; return OK; }
int nvmlDeviceGetTemperatureV(void *h, temp1_t *t)
{
    DEV(h); WHOLE;
    if (t->version != 0x100000C) return VERSION;
    if (t->sensor) return INVAL;
    t->temperature = g->temp;
    return OK;
}
typedef struct { unsigned pid; unsigned long long mem; unsigned gi, ci; } procinfo_t;                 /* 24 */
_Static_assert(sizeof(procinfo_t) == 24, "layout");
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, procinfo_t *out)
{
    DEV(h);
    unsigned have = 0;
    for (int k = 0; k < c.np; k++) {
        if (&c.g[c.p[k].gpu] != g || c.p[k].mig != (m ? m->idx : -1)) continue;
        if (have < *n && out) out[have] = (procinfo_t){ c.p[k].pid, c.p[k].mem, NOID, NOID };
        have++;
    }
    int small = have > *n;
    *n = have;
    return small ? TOOSMALL : OK;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, procinfo_t *out)
{
    DEV(h); (void)out; *n = 0; return OK;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { DEV(h); WHOLE; *mw = g->power; return OK; }
int nvmlDeviceGetNumaNodeId(void *h, unsigned *n) { DEV(h); WHOLE; if (g->numaid < 0) return NOTSUP; *n = g->numaid; return OK; }
int nvmlDeviceGetMemoryAffinity(void *h, unsigned size, unsigned long *set, unsigned scope)
{
    DEV(h); (void)scope;
    if (!size || !set) return INVAL;
    memset(set, 0, size * sizeof *set);
    if (g->numa < 0) return NOTSUP;
    if ((unsigned)g->numa / 64 < size) set[g->numa / 64] = 1UL << (g->numa % 64);
    return OK;
}
/* ---- topology ---- */
int nvmlDeviceGetP2PStatus(void *h, void *to, int caps, unsigned *status)
{
    DEV(h); WHOLE;
    int a = g - c.g, b = (char *)to - gh;
    if (b < 0 || b >= c.ng || caps != 2) return INVAL;  /* NVML_P2P_CAPS_INDEX_NVLINK alone */
    if (c.g[b].lost) return LOST;
    *status = 5;                                        /* NVML_P2P_STATUS_NOT_SUPPORTED */
    for (int k = 0; k < c.nl; k++)
        if ((c.l[k].gpu == a && c.l[k].to == b) || (c.l[k].gpu == b && c.l[k].to == a)) *status = OK;
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(void *h, void *to, unsigned *level)
{
    DEV(h); WHOLE;
    int b = (char *)to - gh;
    if (b < 0 || b >= c.ng) return INVAL;
    if (c.g[b].lost) return LOST;
    *level = g->bridge == c.g[b].bridge ? 30 : 50;      /* NVML_TOPOLOGY_HOSTBRIDGE, _SYSTEM */
    return OK;
}
/* ---- MIG ---- */
int nvmlDeviceGetMigMode(void *h, unsigned *cur, unsigned *pend) { DEV(h); WHOLE; if (g->mig < 0) return NOTSUP; *cur = *pend = g->mig; return OK; }
int nvmlDeviceIsMigDeviceHandle(void *h, unsigned *is) { DEV(h); *is = m != NULL; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { DEV(h); WHOLE; *n = g->mig < 0 ? 0 : g->maxmig; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned idx, void **out)
{
    DEV(h); WHOLE;
    if (g->mig < 0) return NOTSUP;
    if (idx >= (unsigned)g->maxmig) return INVAL;
    if ((r = failing(&c, __func__, g - c.g, idx))) return r;
    if (g->mig == 1)
        for (int i = 0; i < c.nm; i++) if (c.m[i].gpu == (int)(g - c.g) && c.m[i].idx == (int)idx) { *out = &mh[i]; return OK; }
    return NOTFOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) { DEV(h); PART; *out = &gh[m->gpu]; return OK; }
int nvmlDeviceGetGpuInstanceId(void *h, unsigned *id) { DEV(h); PART; *id = m->gi; return OK; }
int nvmlDeviceGetComputeInstanceId(void *h, unsigned *id) { DEV(h); PART; *id = m->ci; return OK; }
int nvmlDeviceGetAttributes_v2(void *h, attr_t *a)
{
    DEV(h); PART;
    memset(a, 0, sizeof *a);
    a->sm = m->sm; a->ce = a->dec = 1; a->gslices = m->gslices; a->cslices = m->cslices; a->memMB = m->mem_mb;
    return OK;
}
/* ---- field values ---- */
int nvmlDeviceGetFieldValues(void *h, int n, field_t *v)
{
    DEV(h); WHOLE;
    for (int i = 0; i < n; i++) {
        v[i].nvmlReturn = NOTSUP;
        if (v[i].fieldId == 230 && g->recovery < -1) v[i].nvmlReturn = -g->recovery;
        if (v[i].fieldId == 230 && g->recovery >= 0) { v[i].nvmlReturn = OK; v[i].valueType = 1; v[i].value.ull = 0; v[i].value.ui = g->recovery; }
    }
    return OK;
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    DEV(h); WHOLE;
    if (g->remap < 0) return NOTSUP;
    *corrected = 0; *uncorrected = g->remap > 0; *pending = g->remap == 1; *failed = g->remap == 2;
    return OK;
}
typedef struct { unsigned char cluster[16]; unsigned status, clique; unsigned char state; } fabric_t;  /* 28 */
_Static_assert(sizeof(fabric_t) == 28, "layout");
int nvmlDeviceGetGpuFabricInfo(void *h, fabric_t *o)
{
    DEV(h); WHOLE;
    if (g->fabric < 0) return NOTSUP;
    memset(o, 0, sizeof *o); o->state = g->fabric;
    return OK;
}
/* ---- events ---- */
int nvmlEventSetCreate(void **s)
{
    SYS;
    set_t *set = *s = calloc(1, sizeof(set_t));
    for (int i = 0; i < c.nx; i++) if (c.x[i].id > set->last) set->last = c.x[i].id;
    return OK;
}
int nvmlEventSetFree(void *s)
{
    SYS;
    pthread_rwlock_wrlock(&waits); free(s); pthread_rwlock_unlock(&waits);
    return OK;
}
int nvmlDeviceGetSupportedEventTypes(void *h, unsigned long long *t) { DEV(h); WHOLE; *t = g->events; return OK; }
int nvmlDeviceRegisterEvents(void *h, unsigned long long mask, void *s)
{
    DEV(h); WHOLE;
    if (mask & ~g->events) return NOTSUP;
    pthread_mutex_lock(&lock); ((set_t *)s)->mask[g - c.g] |= mask; pthread_mutex_unlock(&lock);
    return OK;
}
static int waited(void *sp, event_t *e, unsigned ms);
int nvmlEventSetWait_v2(void *sp, event_t *e, unsigned ms)
{
    pthread_rwlock_rdlock(&waits);
    int r = waited(sp, e, ms);
    pthread_rwlock_unlock(&waits);
    return r;
}
static int waited(void *sp, event_t *e, unsigned ms)
{
    set_t *s = sp;
    struct timespec t0, t;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (;;) {
        conf_t c; int r = sys(&c, "nvmlEventSetWait_v2"); if (r) return r;
        pthread_mutex_lock(&lock);
        xid_t *best = NULL;
        int lost = 0;
        for (int i = 0; i < c.ng; i++) if (s->mask[i] && c.g[i].lost) lost = 1;
        for (int i = 0; i < c.nx; i++) {
            xid_t *x = &c.x[i];
            if (x->gpu < 0 || x->gpu >= c.ng || x->id <= s->last || !(s->mask[x->gpu] & 8)) continue;
            if (!best || x->id < best->id) best = x;
        }
        if (best) {
            s->last = best->id;
            e->device = &gh[best->gpu]; e->type = 8; e->data = best->code; e->gi = best->gi; e->ci = best->ci;
        }
        pthread_mutex_unlock(&lock);
        if (best) return OK;
        if (lost) return LOST;
        clock_gettime(CLOCK_MONOTONIC, &t);
        if ((t.tv_sec - t0.tv_sec) * 1000 + (t.tv_nsec - t0.tv_nsec) / 1000000 >= ms) return TIMEOUT;
        usleep(10000);
    }
}
