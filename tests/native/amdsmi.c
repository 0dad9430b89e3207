/* fake_amdsmi.c - a stand-in for libamd_smi.so, enough for pyrsmi 1.1 (ctypes path).
 *   mkdir -p ROOT/lib; cc -shared -fPIC -O1 -Wall -o ROOT/lib/libamd_smi.so fake_amdsmi.c
 *   ROCM_PATH=ROOT FAKE_AMDSMI_FILE=/path/conf python ...
 * pyrsmi also wants "live" from `cat /sys/module/amdgpu/initstate`: put a `cat` in PATH that says so,
 * or set pyrsmi.rocml._driver_initialized = lambda: True.
 * The file is read again on every call: replace it by rename(2).
 *   init 0                  amdsmi_status_t of amdsmi_init (34: driver not loaded)
 *   bytype real|pyrsmi|none amdsmi_get_processor_handles_by_type: as the real 4-argument one sees pyrsmi's 3
 *                           arguments (INVAL; default), as pyrsmi thinks it is, or NOT_SUPPORTED
 *   handles small|big       big: handles over 32 bits, like most real heap pointers (pyrsmi 1.1 cuts them: no GPUs)
 *   stderr TEXT             amdsmi_init writes this to fd 2 (as libdrm does)
 *   gpu uuid=36 chars pci=0000:c1:00.0 mem=B used=B util=% memutil=% temp=C power=W numa=N devid=0x74a1
 *       serial=16 hex lost=0|1 nouuid=0|1 name=...
 *   fail amdsmi_get_power_info 2 [gpu]
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVAL = 1, NOTSUP = 2, API_FAILED = 7, DRIVER = 34, NOTFOUND = 31, NOTINIT = 32 };
#define MAXGPU 128
#define MAXFAIL 32
typedef struct { char uuid[64], name[256], pci[32], serial[64]; uint64_t mem, used, devid; int util, memutil, temp, power, numa, lost, nouuid; } gpu_t;
typedef struct { char fn[64]; int code, gpu; } fail_t;
typedef struct { int init, bytype, big, ng, nf; char err[256]; gpu_t g[MAXGPU]; fail_t f[MAXFAIL]; } conf_t;

/* --- layouts as pyrsmi 1.1 declares them --- */
typedef union { struct { uint64_t function_number : 3, device_number : 5, bus_number : 8, domain_number : 48; } f; uint64_t as_uint; } bdf_t; /* 8 */
typedef struct { char market_name[256]; uint32_t vendor_id; char vendor_name[256]; uint32_t subvendor_id; uint64_t device_id; uint32_t rev_id;
                 char asic_serial[256]; uint32_t oam_id, num_of_compute_units; uint64_t target_graphics_version; uint32_t subsystem_id, reserved[21]; } asic_t; /* 896 */
typedef struct { uint32_t gfx, umc, mm, reserved[13]; } usage_t;                                       /*  64 */
typedef struct { uint64_t socket_power; uint32_t current_socket_power, average_socket_power; uint64_t gfx_v, soc_v, mem_v; uint32_t power_limit;
                 uint64_t reserved[18]; } power_t;                                                     /* 192 */
_Static_assert(sizeof(bdf_t) == 8 && sizeof(asic_t) == 896 && sizeof(usage_t) == 64 && sizeof(power_t) == 192, "layout");

static int inits;

static const char *field(const char *line, const char *key)
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
static long long num(const char *l, const char *k, long long dflt) { const char *v = field(l, k); return v ? strtoll(v, NULL, 0) : dflt; }
static void load(conf_t *c)
{
    char l[1024];
    const char *path = getenv("FAKE_AMDSMI_FILE");
    FILE *f = path ? fopen(path, "re") : NULL;
    memset(c, 0, sizeof *c);
    if (!f) { c->init = DRIVER; return; }
    while (fgets(l, sizeof l, f)) {
        if (!strncmp(l, "init ", 5)) c->init = atoi(l + 5);
        else if (!strncmp(l, "bytype ", 7)) c->bytype = l[7] == 'p' ? 1 : l[7] == 'n' ? 2 : 0;
        else if (!strncmp(l, "handles ", 8)) c->big = l[8] == 'b';
        else if (!strncmp(l, "stderr ", 7)) snprintf(c->err, sizeof c->err, "%.254s", l + 7);
        else if (!strncmp(l, "gpu ", 4) && c->ng < MAXGPU) {
            gpu_t *g = &c->g[c->ng];
            snprintf(g->uuid, sizeof g->uuid, "00ff74a1-0000-1000-8000-%012d", c->ng);
            snprintf(g->pci, sizeof g->pci, "0000:%02x:00.0", c->ng + 1);
            snprintf(g->serial, sizeof g->serial, "%016X", c->ng + 1);
            strcpy(g->name, "AMD Instinct Fake");
            str(l, "uuid", g->uuid, sizeof g->uuid, 0); str(l, "pci", g->pci, sizeof g->pci, 0);
            str(l, "serial", g->serial, sizeof g->serial, 0); str(l, "name", g->name, sizeof g->name, 1);
            g->mem = num(l, "mem", 206158430208LL); g->used = num(l, "used", 0); g->devid = num(l, "devid", 0x74a1);
            g->util = num(l, "util", 0); g->memutil = num(l, "memutil", 0); g->temp = num(l, "temp", 40); g->power = num(l, "power", 100);
            g->numa = num(l, "numa", 0); g->lost = num(l, "lost", 0); g->nouuid = num(l, "nouuid", 0);
            c->ng++;
        } else if (!strncmp(l, "fail ", 5) && c->nf < MAXFAIL) {
            fail_t *x = &c->f[c->nf]; x->gpu = -1;
            if (sscanf(l + 5, "%63s %d %d", x->fn, &x->code, &x->gpu) >= 2) c->nf++;
        }
    }
    fclose(f);
}
static uintptr_t base(conf_t *c, int socket) { return (c->big ? (uintptr_t)0x55d500000000 : 0) + (socket ? 0x20000 : 0x10000); }
static int dev(conf_t *c, const char *fn, void *h, gpu_t **g)
{
    load(c);
    if (!inits) return NOTINIT;
    uintptr_t i = (uintptr_t)h - base(c, 0);
    if (i % 16 || i / 16 >= (uintptr_t)c->ng) return INVAL;
    *g = &c->g[i / 16];
    for (int k = 0; k < c->nf; k++) if (!strcmp(c->f[k].fn, fn) && (c->f[k].gpu < 0 || c->f[k].gpu == (int)(i / 16))) return c->f[k].code;
    return (*g)->lost ? API_FAILED : OK;
}
#define DEV(h) conf_t c; gpu_t *g; int r = dev(&c, __func__, h, &g); if (r) return r

int amdsmi_init(uint64_t flags)
{
    conf_t c; (void)flags;
    load(&c);
    if (c.err[0] && write(2, c.err, strlen(c.err)) < 0) return API_FAILED;
    if (!c.init) inits = 1;
    return c.init;
}
int amdsmi_shut_down(void) { inits = 0; return OK; }
int amdsmi_status_code_to_string(int s, const char **out) { static __thread char b[64]; snprintf(b, sizeof b, "AMDSMI_STATUS %d (fake)", s); *out = b; return OK; }

int amdsmi_get_processor_handles_by_type(void *a0, void *a1, void *a2, void *a3)
{
    conf_t c; (void)a3;
    load(&c);
    if (!inits) return NOTINIT;
    if (c.bytype == 2) return NOTSUP;
    if (c.bytype == 0) return INVAL;                    /* (socket=1, type=0, ...): what the real one answers to pyrsmi */
    if ((uintptr_t)a0 != 1) return NOTSUP;              /* pyrsmi's idea: (type, handles, count) */
    uint32_t *n = a2; void **out = a1;
    if (out) for (int i = 0; i < c.ng && i < (int)*n; i++) out[i] = (void *)(base(&c, 0) + 16 * i);
    *n = c.ng;
    return OK;
}
int amdsmi_get_socket_handles(uint32_t *n, void **out)         /* one socket a GPU, as the real one */
{
    conf_t c;
    load(&c);
    if (!inits) return NOTINIT;
    if (out) for (int i = 0; i < c.ng && i < (int)*n; i++) out[i] = (void *)(base(&c, 1) + 16 * i);
    *n = c.ng;
    return OK;
}
int amdsmi_get_processor_handles(void *socket, uint32_t *n, void **out)
{
    conf_t c;
    load(&c);
    if (!inits) return NOTINIT;
    uintptr_t i = (uintptr_t)socket - base(&c, 1);
    if (i % 16 || i / 16 >= (uintptr_t)c.ng) return INVAL;
    if (out && *n) out[0] = (void *)(base(&c, 0) + i);
    *n = 1;
    return OK;
}
int amdsmi_get_gpu_asic_info(void *h, asic_t *a)
{
    DEV(h);
    memset(a, 0, sizeof *a);
    snprintf(a->market_name, sizeof a->market_name, "%s", g->name);
    strcpy(a->vendor_name, "Advanced Micro Devices Inc. [AMD/ATI]");
    snprintf(a->asic_serial, sizeof a->asic_serial, "0x%s", g->serial);
    a->vendor_id = a->subvendor_id = 0x1002; a->device_id = g->devid; a->oam_id = (uint32_t)(g - c.g);
    a->num_of_compute_units = 304; a->target_graphics_version = 0x942;
    return OK;
}
int amdsmi_get_gpu_device_bdf(void *h, bdf_t *b)
{
    DEV(h);
    unsigned dom = 0, bus = 0, d = 0, fn = 0;
    if (sscanf(g->pci, "%x:%x:%x.%x", &dom, &bus, &d, &fn) < 4) return API_FAILED;
    b->as_uint = 0;
    b->f.domain_number = dom; b->f.bus_number = bus; b->f.device_number = d; b->f.function_number = fn;
    return OK;
}
int amdsmi_get_gpu_device_uuid(void *h, unsigned *n, char *out)
{
    DEV(h);
    if (!n || !out || *n < 38) return INVAL;
    if (g->nouuid) return NOTSUP;
    snprintf(out, *n, "%s", g->uuid); *n = strlen(g->uuid) + 1;
    return OK;
}
int amdsmi_get_gpu_memory_total(void *h, int type, uint64_t *v) { DEV(h); if (type < 0 || type > 2) return INVAL; *v = g->mem; return OK; }
int amdsmi_get_gpu_memory_usage(void *h, int type, uint64_t *v) { DEV(h); if (type < 0 || type > 2) return INVAL; *v = g->used; return OK; }
int amdsmi_get_gpu_activity(void *h, usage_t *u) { DEV(h); memset(u, 0, sizeof *u); u->gfx = g->util; u->umc = g->memutil; return OK; }
int amdsmi_get_power_info(void *h, power_t *p) { DEV(h); memset(p, 0, sizeof *p); p->current_socket_power = p->socket_power = g->power; return OK; }
int amdsmi_get_temp_metric(void *h, int sensor, int metric, int64_t *t) { DEV(h); if (sensor < 0 || sensor > 2 || metric) return NOTSUP; *t = g->temp; return OK; }
int amdsmi_get_gpu_topo_numa_affinity(void *h, int32_t *n) { DEV(h); *n = g->numa; return OK; }
int amdsmi_topo_get_numa_node_number(void *h, uint32_t *n) { DEV(h); *n = g->numa < 0 ? 0 : g->numa; return OK; }
int amdsmi_get_gpu_memory_reserved_pages(void *h, uint32_t *n, void *rec) { DEV(h); (void)rec; *n = 0; return OK; }
