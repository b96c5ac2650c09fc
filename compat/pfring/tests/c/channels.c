/* One ring and one thread per receive queue; says how many packets each got. */
#include <stdio.h>
#include <stdlib.h>

#include "pfring.h"

static pfring *rings[MAX_NUM_RX_CHANNELS];
static unsigned long counts[MAX_NUM_RX_CHANNELS];

static void count(const struct pfring_pkthdr *h, const u_char *p, const u_char *user)
{
    (void)h, (void)p;
    counts[(long)user]++;
}

static void *reads(void *user)
{
    pfring_loop(rings[(long)user], count, user, 1);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[MAX_NUM_RX_CHANNELS];
    int channels = pfring_open_multichannel(argv[argc - 1], 1500, PF_RING_PROMISC, rings);
    for (long i = 0; i < channels; i++) {
        if (pfring_get_num_rx_channels(rings[i]) != channels || pfring_enable_ring(rings[i]) != 0)
            return 1;
        pthread_create(&threads[i], NULL, reads, (void *)i);
    }
    printf("channels %d\n", channels);
    fflush(stdout);
    for (int i = 0; i < channels; i++) {
        pthread_join(threads[i], NULL);
        printf("channel %d: %lu\n", i, counts[i]);
        pfring_close(rings[i]);
    }
    return 0;
}
