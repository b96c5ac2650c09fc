/* Calls everything once; tests/it/c.rs is the other half. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <libgen.h>
#include <poll.h>
#include <vnplug.h>

#define EXPECT(x) \
    do { \
        if (!(x)) { \
            fprintf(stderr, "line %d: %s\n", __LINE__, #x); \
            exit(1); \
        } \
    } while (0)

static void say(const char *what)
{
    puts(what);
    fflush(stdout);
}

int main(void)
{
    struct vnplug_insn all[] = {{6, 0, 0, 0xffff}};
    struct vnplug_options options;
    struct vnplug_packet packets[8];
    struct vnplug_stats stats = {.size = sizeof stats};
    struct vnplug_device *devices;
    vnplug_port *port = (vnplug_port *)&port;
    char error[VNPLUG_ERRBUF], go[512];
    uint64_t value = 0;
    size_t count;

    EXPECT(strlen(vnplug_version()) >= 5);
    EXPECT(vnplug_list(NULL, error, sizeof error, &devices, &count) == VNPLUG_OK);
    EXPECT(count == 1 && strcmp(devices[0].name, "host:eth0") == 0 && devices[0].queues == 1);
    vnplug_list_free(devices, count);
    EXPECT(vnplug_list("/nowhere", error, sizeof error, &devices, &count) == VNPLUG_E_UNREACHABLE);
    EXPECT(strstr(error, "/nowhere") != NULL && devices == NULL && count == 0);

    vnplug_options_init(&options);
    EXPECT(vnplug_open(&options, error, sizeof error, &port) == VNPLUG_E_INVALID && port == NULL);
    EXPECT(strstr(error, "device") != NULL);
    options.device = "host:eth0";
    options.program = all;
    options.program_len = 1;
    EXPECT(vnplug_open(&options, error, sizeof error, &port) == VNPLUG_E_DENIED);
    EXPECT(strcmp(error, "not for you") == 0);
    say("denied");

    snprintf(go, sizeof go, "%s", getenv("VNPLUG_SOCKET"));
    strcat(dirname(go), "/go");
    for (int i = 0; i < 6000 && access(go, F_OK) != 0; i++)
        usleep(10000);

    EXPECT(vnplug_open(&options, NULL, 0, &port) == VNPLUG_OK);
    EXPECT(strcmp(vnplug_device_name(port), "host:eth0") == 0);
    EXPECT(vnplug_link_type(port) == 1 && vnplug_snaplen(port) == 2048);
    EXPECT(vnplug_set_filter(port, "bad") == VNPLUG_E_FILTER);
    EXPECT(strcmp(vnplug_last_error(port), "syntax error") == 0);
    EXPECT(vnplug_set_filter(port, NULL) == VNPLUG_OK);
    EXPECT(vnplug_set_program(port, all, 1) == VNPLUG_OK);
    EXPECT(vnplug_set_program(port, all, 0) == VNPLUG_E_INVALID);
    EXPECT(vnplug_host_counter(port, "delivered", &value) == VNPLUG_OK && value == 7);
    EXPECT(vnplug_host_counter(port, "nonsense", &value) == VNPLUG_E_NOT_FOUND);
    EXPECT(vnplug_wait(port, 1) == VNPLUG_TIMEOUT);
    EXPECT(vnplug_poll_next(port, packets) == VNPLUG_NOTHING);
    EXPECT(vnplug_next_batch(port, packets, 8, &count) == VNPLUG_NOTHING && count == 0);
    EXPECT(vnplug_next(port, packets) == VNPLUG_NOTHING);
    say("armed");

    struct pollfd pollfd = {.fd = vnplug_fd(port), .events = POLLIN};
    EXPECT(poll(&pollfd, 1, 60000) == 1);
    EXPECT(vnplug_wait(port, 60000) == VNPLUG_READY);
    EXPECT(vnplug_next(port, packets) == VNPLUG_PACKET);
    EXPECT(packets[0].cap_len == 3 && memcmp(packets[0].data, "one", 3) == 0);
    vnplug_release(port);
    EXPECT(vnplug_next_batch(port, packets, 8, &count) == VNPLUG_PACKET && count == 2);
    EXPECT(memcmp(packets[0].data, "two", 3) == 0 && memcmp(packets[1].data, "three", 5) == 0);
    EXPECT(packets[1].wire_len == 5 && packets[1].ts_ns == 1 && packets[1].flags == 0);
    EXPECT(vnplug_stats(port, &stats) == VNPLUG_OK);
    EXPECT(stats.received == 3 && stats.bytes == 11 && stats.lost == 0 && stats.gaps == 0);
    EXPECT(vnplug_next(port, packets) == VNPLUG_NOTHING);
    say("read");

    while (vnplug_next(port, packets) == VNPLUG_NOTHING)
        EXPECT(vnplug_wait(port, 60000) == VNPLUG_READY);
    EXPECT(vnplug_next(port, packets) == VNPLUG_ENDED);
    vnplug_close(port);
    say("ended");
    return 0;
}
