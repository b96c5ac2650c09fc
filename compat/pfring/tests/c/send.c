/* Sends as programs for PF_RING do, and says why it cannot. */
#include <stdio.h>
#include <string.h>

#include "pfring.h"

int main(int argc, char **argv)
{
    char packet[60] = { 0 };
    pfring *ring = pfring_open(argv[argc - 1], 1500, PF_RING_PROMISC);
    int rc;
    if (ring == NULL) {
        perror("pfring_open");
        return 1;
    }
    pfring_set_application_name(ring, "send");
    printf("mode %d\n", pfring_set_socket_mode(ring, send_only_mode));
    printf("enable %d\n", pfring_enable_ring(ring));
    rc = pfring_send(ring, packet, sizeof packet, 1);
    if (rc == PF_RING_ERROR_NOT_SUPPORTED)
        printf("this device cannot transmit: %s\n", strerror(errno));
    pfring_close(ring);
    return rc < 0 ? 0 : 1;
}
