/* A libnvidia-ml.so.1 for tests: what each call answers stands in the text file that KVBENCH_FAKE_NVML names, read again when it changes.
 *
 * Lines are "name value": "gpu1.power 250000" of one GPU, "power 250000" of all, "count 2" of the machine. "CALL.ret N" makes a call
 * fail with NVML's code N (mem, util, power, energy, temp, clock, reasons, pcie, mig, field, proc, ecc, rows, gpm, init), "error N"
 * makes every call to a GPU fail. "sleep_us N" is what each call takes. Compiled against NVIDIA's own nvml.h, which checks every
 * signature and structure.
 */
#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static int opened;
static double began;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* The lines of the state file, read again when it has changed. */
static struct { char name[64]; double value; } lines[512];
static int count;

static void refresh(void) {
    static struct timespec seen;
    static off_t size = -1;
    struct stat found;
    const char *path = getenv("KVBENCH_FAKE_NVML");
    if (!path || stat(path, &found)) return;
    if (found.st_size == size && found.st_mtim.tv_sec == seen.tv_sec && found.st_mtim.tv_nsec == seen.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    for (count = 0; count < 512 && fscanf(file, "%63s %lf", lines[count].name, &lines[count].value) == 2; count++) {}
    fclose(file);
    seen = found.st_mtim;
    size = found.st_size;
}

/* The last line that names `what`, of GPU `gpu` or of all. */
static double state(int gpu, const char *what, double otherwise) {
    char own[80];
    snprintf(own, sizeof own, "gpu%d.%s", gpu, what);
    refresh();
    for (int i = count - 1; i >= 0; i--)
        if (!strcmp(lines[i].name, own) || !strcmp(lines[i].name, what)) return lines[i].value;
    return otherwise;
}

static void pass(double us) {
    struct timespec t = {(time_t)(us / 1e6), (long)(us * 1e3) % 1000000000L};
    if (us > 0) nanosleep(&t, NULL);
}

/* Handles: 1 + index for a GPU, 1000 * (1 + index) + place for a MIG instance of it. */
static int gpu_of(nvmlDevice_t device) {
    intptr_t handle = (intptr_t)device;
    return (int)(handle >= 1000 ? handle / 1000 - 1 : handle - 1);
}
static int instance(nvmlDevice_t device) { return (intptr_t)device >= 1000; }

static nvmlReturn_t refuse(nvmlDevice_t device, const char *call) {
    char name[64];
    if (!opened) return NVML_ERROR_UNINITIALIZED;
    int gpu = gpu_of(device), error = (int)state(gpu, "error", 0);
    pass(state(gpu, "sleep_us", 0));
    if (error) return (nvmlReturn_t)error;
    snprintf(name, sizeof name, "%s.ret", call);
    return (nvmlReturn_t)(int)state(gpu, name, 0);
}
#define REFUSE(device, call) do { nvmlReturn_t r_ = refuse(device, call); if (r_) return r_; } while (0)

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    int error = (int)state(-1, "init.ret", 0);
    if (error) return (nvmlReturn_t)error;
    if (!opened++) began = now();
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) { return opened ? (opened--, NVML_SUCCESS) : NVML_ERROR_UNINITIALIZED; }
nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned int n) { snprintf(text, n, "fake 1.0"); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *n) { *n = (unsigned)state(-1, "count", 1); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index >= (unsigned)state(-1, "count", 1)) return NVML_ERROR_INVALID_ARGUMENT;
    *device = (nvmlDevice_t)(intptr_t)(index + 1);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned int n) {
    snprintf(text, n, state(gpu_of(device), "integrated", 0) ? "NVIDIA GB10" : "Fake H200 %d", gpu_of(device));
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned int n) {
    if (instance(device)) snprintf(text, n, "MIG-fake-%ld", (long)(intptr_t)device);
    else snprintf(text, n, "GPU-%d0000000-fake", gpu_of(device));
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    int gpu = gpu_of(device);
    REFUSE(device, "mem");
    memory->total = state(gpu, "mem.total", 80e9);
    memory->used = state(gpu, "mem.used", 1e9) + state(gpu, "mem.reserved", 6e8);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    int gpu = gpu_of(device);
    REFUSE(device, "mem");
    REFUSE(device, "mem2");
    if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = instance(device) ? 10e9 : state(gpu, "mem.total", 80e9);
    memory->reserved = state(gpu, "mem.reserved", 6e8);
    memory->used = state(gpu, "mem.used", 1e9);
    memory->free = memory->total - memory->used - memory->reserved;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    REFUSE(device, "util");
    if (instance(device)) return NVML_ERROR_NOT_SUPPORTED;
    rates->gpu = state(gpu_of(device), "util", 50);
    rates->memory = state(gpu_of(device), "util.mem", 30);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    REFUSE(device, "power");
    *milliwatts = state(gpu_of(device), "power", 300000);
    return NVML_SUCCESS;
}
/* Power times the time since the start, in steps of 100 ms as real boards count; "energy.at" fixes it. */
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    int gpu = gpu_of(device);
    REFUSE(device, "energy");
    double step = state(gpu, "energy.step_s", 0.1), seconds = (long)((now() - began) / step) * step;
    *millijoules = state(gpu, "energy.at", 1e6 + state(gpu, "power", 300000) * seconds);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius) {
    (void)sensor;
    REFUSE(device, "temp");
    *celsius = state(gpu_of(device), "temp", 55);
    return NVML_SUCCESS;
}
#ifdef WITH_TEMPERATURE_V
nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    REFUSE(device, "temp");
    temperature->temperature = state(gpu_of(device), "temp", 55);
    return NVML_SUCCESS;
}
#endif
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    REFUSE(device, "clock");
    *mhz = type == NVML_CLOCK_MEM ? 2619 : state(gpu_of(device), "clock", 1980);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *bits) {
    REFUSE(device, "reasons");
    *bits = state(gpu_of(device), "reasons", 0);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned int *kilobytes) {
    REFUSE(device, "pcie");
    pass(20000); /* what a real one takes: it counts for 20 ms */
    *kilobytes = counter == NVML_PCIE_UTIL_TX_BYTES ? 2000 : 1000;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    REFUSE(device, "mig");
    *current = *pending = state(gpu_of(device), "mig", 0) > 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *n) { (void)device; *n = 7; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int place, nvmlDevice_t *found) {
    if (place >= (unsigned)state(gpu_of(device), "mig", 0)) return NVML_ERROR_NOT_FOUND;
    *found = (nvmlDevice_t)(intptr_t)(1000 * (gpu_of(device) + 1) + place);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int n, nvmlFieldValue_t *values) {
    int gpu = gpu_of(device), some = 0;
    REFUSE(device, "field");
    for (int i = 0; i < n; i++) {
        nvmlFieldValue_t *one = &values[i];
        one->nvmlReturn = NVML_SUCCESS;
        one->latencyUsec = 7;
        switch (one->fieldId) {
        case NVML_FI_DEV_POWER_INSTANT:
        case NVML_FI_DEV_POWER_AVERAGE:
            if (one->scopeId != (unsigned)state(gpu, "power.scope", 0)) one->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
            one->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            one->value.uiVal = 412345;
            break;
        case NVML_FI_DEV_MEMORY_TEMP:
            one->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            one->value.uiVal = 61;
            break;
        case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX:
        case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
            one->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
            one->value.ullVal = one->scopeId == ~0u ? 18 : 1;
            break;
        default:
            one->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        }
        some |= one->nvmlReturn == NVML_SUCCESS;
    }
    return some ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *n, nvmlProcessInfo_t *found) {
    REFUSE(device, "proc");
    if (!found || *n < 2) { *n = 2; return NVML_ERROR_INSUFFICIENT_SIZE; }
    *n = 2;
    memset(found, 0, 2 * sizeof *found);
    found[0].pid = 41; found[0].usedGpuMemory = 500000000ULL;
    found[1].pid = 42; found[1].usedGpuMemory = ~0ULL; /* not told */
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t kind,
                                         unsigned long long *count) {
    (void)kind;
    REFUSE(device, "ecc");
    *count = type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? 3 : 1;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending,
                                       unsigned int *failed) {
    REFUSE(device, "rows");
    *corrected = 2; *uncorrected = 1; *pending = 1; *failed = 0;
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support) {
    REFUSE(device, "gpm");
    support->isSupportedDevice = state(gpu_of(device), "gpm", 1);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
    *sample = (nvmlGpmSample_t)calloc(1, sizeof(double));
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) { free(sample); return NVML_SUCCESS; }
nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample) {
    REFUSE(device, "gpm.sample");
    *(double *)sample = now();
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *asked) {
    if (asked->version != NVML_GPM_METRICS_GET_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (*(double *)asked->sample2 - *(double *)asked->sample1 < 0.1) return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < asked->numMetrics; i++) {
        unsigned id = asked->metrics[i].metricId;
        asked->metrics[i].nvmlReturn = id == NVML_GPM_METRIC_ANY_TENSOR_UTIL ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
        asked->metrics[i].value = id == NVML_GPM_METRIC_DRAM_BW_UTIL ? 71.5 : id == NVML_GPM_METRIC_SM_OCCUPANCY ? 33.25 : 2;
    }
    return NVML_SUCCESS;
}
const char *nvmlErrorString(nvmlReturn_t code) {
    switch (code) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}
