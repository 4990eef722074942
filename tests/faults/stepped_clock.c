/* A library for LD_PRELOAD: adds an offset to the wall clock of a process, and changes no other clock.
 *
 * STEPPED_CLOCK_FILE names a file of 8 bytes, the offset in seconds, which may change at any time. libfaketime
 * does the same, but its version in Debian 12 also breaks waits with a timeout, which Python uses in each lock.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t no_offset_s = 0;
static const volatile int64_t *offset_s = &no_offset_s;
static int (*next_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_offset(void) {
  next_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  const char *path = getenv("STEPPED_CLOCK_FILE");
  int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (descriptor < 0) return;
  void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (mapped != MAP_FAILED) offset_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *result) {
  if (!next_clock_gettime) map_offset(); /* a constructor of another library may ask for the time first */
  int status = next_clock_gettime(clock, result);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) result->tv_sec += *offset_s;
  return status;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
  (void)zone;
  struct timespec now;
  int status = clock_gettime(CLOCK_REALTIME, &now);
  result->tv_sec = now.tv_sec;
  result->tv_usec = now.tv_nsec / 1000;
  return status;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
