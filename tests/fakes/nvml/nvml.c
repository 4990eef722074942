/*
 * A stand-in for libnvidia-ml.so.1 under the real pynvml, scripted by a text file.
 *
 * FAKE_NVML_STATE names the file. It is read anew on every call, so a test changes the hardware by
 * writing it (replace it by rename, so that no half-written file is seen). Lines:
 *
 *   count=2                 how many GPUs there are
 *   init=!9                 nvmlInit fails with error 9; likewise count=!1
 *   0.name=NVIDIA H200      readings of GPU 0; what is not given has a default
 *   0.uuid=GPU-...
 *   0.memory_total=1000     bytes, likewise memory_used
 *   0.utilization=97        percent
 *   0.temperature=91        degrees Celsius
 *   0.power=700000          milliwatts
 *   0.utilization=!3        that call fails with error 3 (not supported)
 *   0.lost=15               every call on that GPU fails with error 15 (GPU is lost)
 *   0.handle=!15            the handle itself is not to be had
 *
 * Only the functions that Genie calls are here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int result_t;
typedef struct { int index; } device_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned int version; int sensor; int temperature; } temperature_v1_t;

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, TOO_SMALL = 7 };
enum { GPUS_MAX = 16, VALUE_MAX = 128 };

static device_t devices[GPUS_MAX];
static int init_count;

/* Copies the value of `key` into `out` and returns 1, or returns 0 when the file does not have it. */
static int state_value(const char *key, char out[VALUE_MAX])
{
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    size_t key_length = strlen(key);
    int found = 0;

    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = '\0';
        if (strncmp(line, key, key_length) == 0 && line[key_length] == '=') {
            snprintf(out, VALUE_MAX, "%.*s", VALUE_MAX - 1, line + key_length + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

/* A value or the default; "!N" becomes the error N. */
static result_t value_of(const char *key, const char *otherwise, char out[VALUE_MAX])
{
    if (!state_value(key, out))
        snprintf(out, VALUE_MAX, "%s", otherwise);
    return out[0] == '!' ? atoi(out + 1) : OK;
}

static result_t reading(device_t *device, const char *name, const char *otherwise, char out[VALUE_MAX])
{
    char key[64];

    if (init_count == 0)
        return UNINITIALIZED;
    if (device < devices || device >= devices + GPUS_MAX)
        return INVALID;
    snprintf(key, sizeof key, "%d.lost", device->index);
    if (state_value(key, out) && atoi(out) != 0)
        return atoi(out);
    snprintf(key, sizeof key, "%d.%s", device->index, name);
    return value_of(key, otherwise, out);
}

static result_t number(device_t *device, const char *name, const char *otherwise, unsigned long long *out)
{
    char text[VALUE_MAX];
    result_t result = reading(device, name, otherwise, text);

    if (result == OK)
        *out = strtoull(text, NULL, 10);
    return result;
}

static result_t text(device_t *device, const char *name, const char *otherwise, char *out, unsigned int size)
{
    char found[VALUE_MAX];
    result_t result = reading(device, name, otherwise, found);

    if (result == OK && strlen(found) >= size)
        return TOO_SMALL;
    if (result == OK)
        strcpy(out, found);
    return result;
}

result_t nvmlInitWithFlags(unsigned int flags)
{
    char found[VALUE_MAX];
    result_t result = value_of("init", "0", found);

    (void)flags;
    if (result != OK)
        return result;
    for (int index = 0; index < GPUS_MAX; index++)
        devices[index].index = index;
    init_count++;
    return OK;
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
    return "an error of the fake NVML";
}

result_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    char found[VALUE_MAX];
    result_t result = value_of("count", "0", found);

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
    char otherwise[VALUE_MAX];

    snprintf(otherwise, sizeof otherwise, "GPU-00000000-0000-0000-0000-%012d",
             device >= devices && device < devices + GPUS_MAX ? device->index : 0);
    return text(device, "uuid", otherwise, uuid, size);
}

result_t nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory)
{
    unsigned long long total = 0, used = 0;
    result_t result = number(device, "memory_total", "85899345920", &total);

    if (result == OK)
        result = number(device, "memory_used", "1073741824", &used);
    if (result != OK)
        return result;
    memory->total = total;
    memory->used = used;
    memory->free = total - used;
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

/* Drivers before 560 do not have this one: "0.temperature_v=!13" plays such a driver. */
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

result_t nvmlDeviceGetPowerUsage(device_t *device, unsigned int *milliwatts)
{
    unsigned long long value = 0;
    result_t result = number(device, "power", "70000", &value);

    if (result == OK)
        *milliwatts = (unsigned int)value;
    return result;
}
