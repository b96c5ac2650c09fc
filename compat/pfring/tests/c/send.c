/*
 * Sends as programs for PF_RING do: it repeats what fails, and hears no signal meanwhile. -2 alone is
 * "not this frame".
 *
 *   -i device  -n frames  -l length  -f flush each  -w tx watermark  -t threads  -s pause in ms
 *   -b begin without a mode  -g wait for a line before sending
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pfring.h"

static pfring *ring;
static int frames = 1, length = 60, flush, pause_ms;
static atomic_int sent, again, given_up, last_error, last_rc;

/* A UDP frame of thread `thread`, the number at byte 42. */
static void forge(u_char *frame, int thread, u_int32_t number)
{
    static const u_char header[42] = {
        2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0,
        192, 0, 2, 1, 192, 0, 2, 2, 3, 232, 0, 9, 0, 26, 0, 0,
    };
    memset(frame, 0, length);
    memcpy(frame, header, sizeof header);
    frame[35] = (u_char)thread;
    number = htonl(number);
    memcpy(frame + 42, &number, sizeof number);
}

static void *run(void *thread)
{
    u_char *frame = malloc(length > 60 ? length : 60);
    for (int i = 0; i < frames; i++) {
        int rc;
        forge(frame, (int)(size_t)thread, i);
        while ((rc = pfring_send(ring, (char *)frame, length, flush)) < 0 && rc != -2) {
            again++;
            last_rc = rc;
            last_error = errno;
        }
        if (rc == length)
            sent++;
        else
            given_up++;
        if (pause_ms)
            usleep(pause_ms * 1000);
    }
    free(frame);
    return NULL;
}

int main(int argc, char **argv)
{
    const char *device = NULL;
    int option, rc, threads = 1, wait = 0, watermark = 0, mode = 1;
    pthread_t all[8];
    while ((option = getopt(argc, argv, "i:n:l:fw:t:s:bg")) >= 0)
        switch (option) {
        case 'i': device = optarg; break;
        case 'n': frames = atoi(optarg); break;
        case 'l': length = atoi(optarg); break;
        case 'f': flush = 1; break;
        case 'w': watermark = atoi(optarg); break;
        case 't': threads = atoi(optarg); break;
        case 's': pause_ms = atoi(optarg); break;
        case 'b': mode = 0; break;
        case 'g': wait = 1; break;
        default: return 2;
        }
    ring = pfring_open(device, 1536, PF_RING_PROMISC);
    if (ring == NULL) {
        perror("open");
        return 1;
    }
    pfring_set_application_name(ring, "send");
    if (mode && (rc = pfring_set_socket_mode(ring, send_only_mode)) != 0)
        printf("mode %d: %s\n", rc, strerror(errno));
    if ((rc = pfring_enable_ring(ring)) != 0)
        printf("enable %d: %s\n", rc, strerror(errno));
    if (watermark && pfring_set_tx_watermark(ring, watermark) != 0)
        return 1;
    puts("ready");
    fflush(stdout);
    if (wait)
        getchar();
    for (int i = 0; i < threads; i++)
        pthread_create(&all[i], NULL, run, (void *)(size_t)i);
    for (int i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
    rc = pfring_flush_tx_packets(ring);
    printf("flush %d sent %d given_up %d again %d last %d: %s\n", rc, sent, given_up, again, last_rc,
           strerror(last_error));
    pfring_close(ring);
    return 0;
}
