/*
 * Fake libnvidia-ml.so.1 for pynvml and the readings of the grid, configured by a text file.
 *
 * FAKE_NVML_STATE is its path. It is checked on every call, so a test changes the hardware by replacing the
 * file (atomically, with rename). Lines:
 *
 *   hangs=1                 every call blocks while this line exists
 *   count=2                 number of GPUs
 *   init=!9                 nvmlInit fails with error 9; likewise count=!1
 *   0.name=NVIDIA H200      readings of GPU 0; all have defaults
 *   0.uuid=GPU-...
 *   0.memory_total=1000     bytes, likewise memory_used, and memory_reserved, which the older call counts
 *                           as used; 0.memory_v2=!13 simulates a driver with only the older call
 *   0.utilization=97        percent
 *   0.temperature=91        degrees Celsius
 *   0.power=700000          milliwatts
 *   0.ecc=2                 uncorrected ECC errors since the driver was loaded
 *   0.capability=9.0        compute capability
 *   0.bus=7                 number on the PCI bus
 *   0.link.3=switch         an active link to a switch; gpu:7, npu:7 (a processor) and other:7 (an unknown
 *                           device) are links to the device with that bus number; off is inactive
 *   0.numa=5                mask of the local NUMA nodes, the lowest 64
 *   0.processes=12:4096,13:?   PIDs with bytes, ? if unknown; likewise mps and graphics
 *   0.clocks=64             mask of throttle reasons; 0.clocks_event=!13 simulates a driver before 535
 *   0.remapped=0,1,0,1      remapped rows: corrected errors, uncorrected errors, pending, failed
 *   0.retired_pending=1     retirement of pages is pending
 *   0.recovery=1            recovery action of the driver
 *   0.utilization=!3        that call fails with error 3 (not supported)
 *   0.lost=15               every call on that GPU fails with error 15 (GPU is lost)
 *   0.handle=!15            getting the handle fails
 *
 * Contains only the functions that Genie calls.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

typedef int result_t;
typedef struct { int index; } device_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned int version; int sensor; int temperature; } temperature_v1_t;
typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char id[32];
} pci_t;
typedef struct {
    unsigned int pid;
    unsigned long long memory;
    unsigned int instance, compute_instance;
} process_t;
typedef struct {
    unsigned int field, scope;
    long long timestamp, latency;
    int kind;
    result_t result;
    union { double d; unsigned int ui; unsigned long long ull; } value;
} field_t;

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7, WRONG_VERSION = 25 };
enum { LINKS_MAX = 18, TO_GPU = 0, TO_NPU = 1, TO_SWITCH = 2, TO_OTHER = 255, RECOVERY_ACTION = 230 };
enum { GPUS_MAX = 16, VALUE_MAX = 128, STATE_MAX = 1 << 15 };

static device_t devices[GPUS_MAX];
static int init_count;

/* Text of the file, per thread. It is read again only after the file was replaced: reading it for every value
 * would be slower than a real driver, and benchmarks use this library. */
static _Thread_local char state[STATE_MAX];

static void reload_state(void)
{
    static _Thread_local struct stat seen;
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    FILE *file;

    if (!path || stat(path, &now) != 0) {
        state[0] = '\0';
        seen.st_ino = 0;
        return;
    }
    if (now.st_ino == seen.st_ino && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec && now.st_size == seen.st_size)
        return;
    file = fopen(path, "r");
    state[file ? fread(state, 1, sizeof state - 1, file) : 0] = '\0';
    if (file)
        fclose(file);
    seen = now;
}

/* Copies the value of `key` into `out` and returns 1, or returns 0 when the file does not have it. */
static int state_value(const char *key, char out[VALUE_MAX])
{
    size_t key_length = strlen(key);
    int found = 0;

    for (const char *line = state, *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        if (!end)
            break; /* incomplete line */
        if (strncmp(line, key, key_length) == 0 && line[key_length] == '=') {
            snprintf(out, VALUE_MAX, "%.*s", (int)(end - line - key_length - 1), line + key_length + 1);
            found = 1;
        }
    }
    return found;
}

/* Called first in every function. */
static void begin(void)
{
    const struct timespec pause = {0, 2000000};
    char found[VALUE_MAX];

    reload_state();
    while (state_value("hangs", found)) {
        nanosleep(&pause, NULL);
        reload_state();
    }
}

/* A value or the default; "!N" becomes the error N. */
static result_t value_of(const char *key, const char *fallback, char out[VALUE_MAX])
{
    if (!state_value(key, out))
        snprintf(out, VALUE_MAX, "%s", fallback);
    return out[0] == '!' ? atoi(out + 1) : OK;
}

static result_t reading(device_t *device, const char *name, const char *fallback, char out[VALUE_MAX])
{
    char key[64];

    begin();
    if (init_count == 0)
        return UNINITIALIZED;
    if (device < devices || device >= devices + GPUS_MAX)
        return INVALID;
    snprintf(key, sizeof key, "%d.lost", device->index);
    if (state_value(key, out) && atoi(out) != 0)
        return atoi(out);
    snprintf(key, sizeof key, "%d.%s", device->index, name);
    return value_of(key, fallback, out);
}

static result_t number(device_t *device, const char *name, const char *fallback, unsigned long long *out)
{
    char text[VALUE_MAX];
    result_t result = reading(device, name, fallback, text);

    if (result == OK)
        *out = strtoull(text, NULL, 10);
    return result;
}

static result_t text(device_t *device, const char *name, const char *fallback, char *out, unsigned int size)
{
    char found[VALUE_MAX];
    result_t result = reading(device, name, fallback, found);

    if (result == OK && strlen(found) >= size)
        return TOO_SMALL;
    if (result == OK)
        strcpy(out, found);
    return result;
}

result_t nvmlInitWithFlags(unsigned int flags)
{
    char found[VALUE_MAX];
    result_t result;

    (void)flags;
    begin();
    result = value_of("init", "0", found);
    if (result != OK)
        return result;
    for (int index = 0; index < GPUS_MAX; index++)
        devices[index].index = index;
    init_count++;
    return OK;
}

result_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

result_t nvmlShutdown(void)
{
    if (init_count == 0)
        return UNINITIALIZED;
    init_count--;
    return OK;
}

const char *nvmlErrorString(result_t result)
{
    (void)result;
    return "error of the fake NVML";
}

result_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    char found[VALUE_MAX];
    result_t result;

    begin();
    result = value_of("count", "0", found);
    if (init_count == 0)
        return UNINITIALIZED;
    if (result == OK)
        *count = (unsigned int)atoi(found);
    return result;
}

result_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t **device)
{
    char found[VALUE_MAX];
    unsigned int count = 0;
    result_t result = nvmlDeviceGetCount_v2(&count);

    if (result != OK)
        return result;
    if (index >= count || index >= GPUS_MAX)
        return INVALID;
    *device = &devices[index];
    return reading(*device, "handle", "0", found);
}

result_t nvmlDeviceGetName(device_t *device, char *name, unsigned int size)
{
    return text(device, "name", "NVIDIA Fake 80GB", name, size);
}

result_t nvmlDeviceGetUUID(device_t *device, char *uuid, unsigned int size)
{
    char fallback[VALUE_MAX];

    snprintf(fallback, sizeof fallback, "GPU-00000000-0000-0000-0000-%012d",
             device >= devices && device < devices + GPUS_MAX ? device->index : 0);
    return text(device, "uuid", fallback, uuid, size);
}

result_t nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory)
{
    unsigned long long total = 0, used = 0, reserved = 0;
    result_t result = number(device, "memory_total", "85899345920", &total);

    if (result == OK)
        result = number(device, "memory_used", "1073741824", &used);
    if (result == OK)
        result = number(device, "memory_reserved", "0", &reserved);
    if (result != OK)
        return result;
    memory->total = total;
    memory->used = used + reserved;
    memory->free = total - used - reserved;
    return OK;
}

result_t nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *memory)
{
    char found[VALUE_MAX];
    memory_t older;
    result_t result = reading(device, "memory_v2", "0", found);

    if (memory->version != (sizeof *memory | 2u << 24))
        return WRONG_VERSION;
    if (result == OK)
        result = nvmlDeviceGetMemoryInfo(device, &older);
    if (result == OK)
        result = number(device, "memory_reserved", "0", &memory->reserved);
    if (result != OK)
        return result;
    memory->total = older.total;
    memory->used = older.used - memory->reserved;
    memory->free = older.free;
    return OK;
}

result_t nvmlDeviceGetUtilizationRates(device_t *device, utilization_t *rates)
{
    unsigned long long percent = 0;
    result_t result = number(device, "utilization", "0", &percent);

    if (result == OK) {
        rates->gpu = (unsigned int)percent;
        rates->memory = 0;
    }
    return result;
}

result_t nvmlDeviceGetTemperature(device_t *device, int sensor, unsigned int *celsius)
{
    unsigned long long value = 0;
    result_t result = number(device, "temperature", "40", &value);

    (void)sensor;
    if (result == OK)
        *celsius = (unsigned int)value;
    return result;
}

/* Drivers before 560 do not have this function: "0.temperature_v=!13" simulates such a driver. */
result_t nvmlDeviceGetTemperatureV(device_t *device, temperature_v1_t *temperature)
{
    char found[VALUE_MAX];
    unsigned int celsius = 0;
    result_t result = reading(device, "temperature_v", "0", found);

    if (result == OK)
        result = nvmlDeviceGetTemperature(device, temperature->sensor, &celsius);
    if (result == OK)
        temperature->temperature = (int)celsius;
    return result;
}

/* Supports only uncorrected errors (1) since the driver was loaded (0). */
result_t nvmlDeviceGetTotalEccErrors(device_t *device, int kind, int counter, unsigned long long *count)
{
    return kind == 1 && counter == 0 ? number(device, "ecc", "0", count) : NOT_SUPPORTED;
}

result_t nvmlDeviceGetPowerUsage(device_t *device, unsigned int *milliwatts)
{
    unsigned long long value = 0;
    result_t result = number(device, "power", "70000", &value);

    if (result == OK)
        *milliwatts = (unsigned int)value;
    return result;
}

result_t nvmlDeviceGetCudaComputeCapability(device_t *device, int *major, int *minor)
{
    char found[VALUE_MAX];
    result_t result = reading(device, "capability", "9.0", found);

    if (result == OK)
        sscanf(found, "%d.%d", major, minor);
    return result;
}

static void set_bus(pci_t *pci, unsigned int bus)
{
    memset(pci, 0, sizeof *pci);
    pci->bus = bus;
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", bus);
}

result_t nvmlDeviceGetPciInfo_v3(device_t *device, pci_t *pci)
{
    char fallback[VALUE_MAX];
    unsigned long long bus = 0;
    result_t result;

    snprintf(fallback, sizeof fallback, "%d",
             device >= devices && device < devices + GPUS_MAX ? device->index + 1 : 0);
    result = number(device, "bus", fallback, &bus);
    if (result == OK)
        set_bus(pci, (unsigned int)bus);
    return result;
}

static result_t link_text(device_t *device, unsigned int link, char out[VALUE_MAX])
{
    char name[32];

    if (link >= LINKS_MAX)
        return INVALID;
    snprintf(name, sizeof name, "link.%u", link);
    return reading(device, name, "!3", out);
}

result_t nvmlDeviceGetNvLinkState(device_t *device, unsigned int link, unsigned int *active)
{
    char found[VALUE_MAX];
    result_t result = link_text(device, link, found);

    if (result == OK)
        *active = strcmp(found, "off") != 0;
    return result;
}

result_t nvmlDeviceGetNvLinkRemoteDeviceType(device_t *device, unsigned int link, unsigned int *kind)
{
    char found[VALUE_MAX];
    result_t result = link_text(device, link, found);

    if (result == OK)
        *kind = strcmp(found, "switch") == 0       ? TO_SWITCH
                : strncmp(found, "npu:", 4) == 0   ? TO_NPU
                : strncmp(found, "other:", 6) == 0 ? TO_OTHER
                                                   : TO_GPU;
    return result;
}

result_t nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t *device, unsigned int link, pci_t *pci)
{
    char found[VALUE_MAX];
    result_t result = link_text(device, link, found);

    if (result == OK)
        set_bus(pci, strchr(found, ':') ? (unsigned int)atoi(strchr(found, ':') + 1) : 0);
    return result;
}

result_t nvmlDeviceGetMemoryAffinity(device_t *device, unsigned int size, unsigned long *nodes, int scope)
{
    unsigned long long mask = 0;
    result_t result = number(device, "numa", "1", &mask);

    (void)scope;
    if (result == OK) {
        memset(nodes, 0, size * sizeof *nodes);
        nodes[0] = (unsigned long)mask;
    }
    return result;
}

/* Like NVML: returns the required size if the array is too small; an empty list needs no array. */
static result_t processes(device_t *device, const char *name, unsigned int *count, process_t *out)
{
    char found[VALUE_MAX], *entry, *rest = NULL;
    unsigned int seen = 0, capacity = *count;
    result_t result = reading(device, name, "", found);

    if (result != OK)
        return result;
    for (entry = strtok_r(found, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest), seen++) {
        const char *memory = strchr(entry, ':') + 1;

        if (seen < capacity && out) {
            memset(&out[seen], 0, sizeof out[seen]);
            out[seen].pid = (unsigned int)atoi(entry);
            out[seen].memory = *memory == '?' ? ~0ULL : strtoull(memory, NULL, 10);
        }
    }
    *count = seen;
    return seen > capacity ? TOO_SMALL : OK;
}

result_t nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned int *count, process_t *out)
{
    return processes(device, "processes", count, out);
}

result_t nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *device, unsigned int *count, process_t *out)
{
    return processes(device, "mps", count, out);
}

result_t nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *device, unsigned int *count, process_t *out)
{
    return processes(device, "graphics", count, out);
}

result_t nvmlDeviceGetCurrentClocksThrottleReasons(device_t *device, unsigned long long *reasons)
{
    return number(device, "clocks", "0", reasons);
}

result_t nvmlDeviceGetCurrentClocksEventReasons(device_t *device, unsigned long long *reasons)
{
    char found[VALUE_MAX];
    result_t result = reading(device, "clocks_event", "0", found);

    return result == OK ? nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons) : result;
}

result_t nvmlDeviceGetRemappedRows(device_t *device, unsigned int *corrected, unsigned int *others,
                                   unsigned int *pending, unsigned int *failed)
{
    char found[VALUE_MAX];
    result_t result = reading(device, "remapped", "0,0,0,0", found);

    if (result == OK)
        sscanf(found, "%u,%u,%u,%u", corrected, others, pending, failed);
    return result;
}

result_t nvmlDeviceGetRetiredPagesPendingStatus(device_t *device, int *pending)
{
    unsigned long long value = 0;
    result_t result = number(device, "retired_pending", "0", &value);

    if (result == OK)
        *pending = (int)value;
    return result;
}

result_t nvmlDeviceGetFieldValues(device_t *device, int count, field_t *fields)
{
    unsigned long long action = 0;
    result_t result = number(device, "recovery", "0", &action);

    for (int place = 0; place < count; place++) {
        fields[place].result = fields[place].field == RECOVERY_ACTION ? result : NOT_SUPPORTED;
        fields[place].value.ui = (unsigned int)action;
    }
    return OK;
}
