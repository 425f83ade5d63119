/* Writes below $FULL_DISK fail with "no space left on device" once the file $FULL_DISK_NOW exists.

   Loaded with LD_PRELOAD into one rank, so that the disk of that rank alone is full. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_full(int fd) {
  const char *below = getenv("FULL_DISK"), *now = getenv("FULL_DISK_NOW");
  char link[64], path[4096];
  if (below == NULL || now == NULL || access(now, F_OK) != 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return strncmp(path, below, strlen(below)) == 0;
}

#define WRAP(name, parameters, arguments)                                      \
  ssize_t name parameters {                                                    \
    static ssize_t(*next) parameters;                                          \
    if (next == NULL) next = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name);   \
    if (is_full(fd)) {                                                         \
      errno = ENOSPC;                                                          \
      return -1;                                                               \
    }                                                                          \
    return next arguments;                                                     \
  }

WRAP(write, (int fd, const void *data, size_t size), (fd, data, size))
WRAP(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRAP(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRAP(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRAP(pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
WRAP(pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
