/*
 * How long a call sleeps that found nothing: until the watermark, or until a time. It ends with 0 and "ok", or
 * says what was wrong.
 *
 *     sleep DEVICE    a device of 200 packets a second
 */
#include <pfring.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static pfring *ring;
static unsigned queued;
static double slept;

#define CHECK(what)                                                                                       \
    do {                                                                                                  \
        if (!(what)) {                                                                                    \
            fprintf(stderr, "line %d: not %s; %u queued, slept %.3f s\n", __LINE__, #what, queued, slept); \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* Reads all there is, then waits for more; how many there are then, and how long that took. */
static void sleeps(int polls)
{
    struct pfring_pkthdr header;
    u_char *packet;
    while (pfring_recv(ring, &packet, 0, &header, 0) > 0)
        ;
    double began = now();
    if (polls)
        CHECK(pfring_poll(ring, 30000) == 1);
    else
        CHECK(pfring_recv(ring, &packet, 0, &header, 1) == 1);
    slept = now() - began;
    queued = pfring_get_num_queued_pkts(ring) + !polls;
}

int main(int argc, char **argv)
{
    CHECK(argc == 2 && (ring = pfring_open(argv[1], 1514, 0)) != NULL);
    CHECK(pfring_enable_ring(ring) == 0);
    for (int polls = 0; polls < 2; polls++) {
        /* A packet alone does not wait for a watermark that the program does not know of. */
        if (polls == 0) {
            sleeps(polls);
            CHECK(queued < 100);
        }
        /* The watermark ends it. */
        CHECK(pfring_set_poll_duration(ring, 60000) == 0);
        CHECK(pfring_set_poll_watermark(ring, 60) == 0);
        sleeps(polls);
        CHECK(queued >= 60 && slept > 0.2 && slept < 25);
        /* Its own time ends it before that, */
        CHECK(pfring_set_poll_watermark(ring, 20000) == 0);
        CHECK(pfring_set_poll_watermark_timeout(ring, 300) == 0);
        sleeps(polls);
        CHECK(queued >= 40 && slept > 0.25 && slept < 25);
        /* and without one the poll duration. */
        CHECK(pfring_set_poll_watermark_timeout(ring, 0) == 0);
        CHECK(pfring_set_poll_duration(ring, 400) == 0);
        sleeps(polls);
        CHECK(queued >= 50 && slept > 0.35 && slept < 25);
        /* One packet is enough. */
        CHECK(pfring_set_poll_watermark(ring, 1) == 0);
        sleeps(polls);
        CHECK(slept < 0.2 || queued > 1);
    }
    pfring_close(ring);
    puts("ok");
    return 0;
}
