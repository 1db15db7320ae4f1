// Stops or kills this process at a point of a call: part of a build of the core with -DKOS_POINTS.
#include "core.h"

#include <signal.h>

static int stop_point = -1, stop_count, stop_signal;

__attribute__((visibility("default"))) void stop_at(int point, int count, int number) {
    stop_point = point;
    stop_count = count;
    stop_signal = number;
}

void kos_pass(int point) {
    if (point == stop_point && !--stop_count)
        raise(stop_signal);
}
