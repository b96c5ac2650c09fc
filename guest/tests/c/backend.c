/* Both ends of channels, each in a process; e2e/tests/backend_c.rs is the other half. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vnplug.h>

#define EXPECT(x) \
    do { \
        if (!(x)) { \
            fprintf(stderr, "%s: line %d: %s\n", mode, __LINE__, #x); \
            exit(1); \
        } \
    } while (0)

enum { SOON = 60000 };

static const char *mode;
static char error[VNPLUG_ERRBUF];
static uint8_t big[VNPLUG_MAX_SAID + 1];

static void say(const char *what)
{
    puts(what);
    fflush(stdout);
}

/* A page whose first word is a sequence: odd while the back-end writes. */
static void publish(vnplug_backend *backend, uint32_t region, const char *text)
{
    struct vnplug_memory memory;
    uint64_t *sequence;

    EXPECT(vnplug_backend_memory(backend, region, &memory) == VNPLUG_OK);
    EXPECT(memory.len == 4096 && memory.writable);
    sequence = (uint64_t *)memory.data;
    __atomic_store_n(sequence, *sequence + 1, __ATOMIC_RELEASE);
    for (size_t i = 0; i <= strlen(text); i++)
        memory.data[8 + i] = (uint8_t)text[i];
    __atomic_store_n(sequence, *sequence + 1, __ATOMIC_RELEASE);
}

static uint32_t joined(vnplug_backend *backend, struct vnplug_news *news)
{
    EXPECT(vnplug_backend_next(backend, SOON, news) == 1 && news->kind == VNPLUG_NEWS_JOINED);
    EXPECT(strcmp(news->text, "uid:0") == 0 && strcmp(news->label, "in C") == 0);
    EXPECT(news->version == 2 && news->channel != 0 && news->len == 0);
    return news->channel;
}

static void serve(void)
{
    struct vnplug_backend_options options;
    struct vnplug_news news;
    struct vnplug_memory memory;
    vnplug_backend *backend = (vnplug_backend *)&backend, *second = backend;
    uint32_t channel, region, both;
    char *early = malloc(sizeof(size_t));

    vnplug_backend_options_init(&options);
    EXPECT(vnplug_backend_register(NULL, error, sizeof error, &backend) == VNPLUG_E_INVALID && !backend);
    EXPECT(vnplug_backend_register(&options, error, sizeof error, &backend) == VNPLUG_E_INVALID);
    options.id = 86;
    options.name = "kv";
    EXPECT(vnplug_backend_register(&options, error, sizeof error, &backend) == VNPLUG_E_DENIED);
    options.id = 85;
    options.events_in = 33;
    EXPECT(vnplug_backend_register(&options, error, sizeof error, &backend) < 0);
    options.events_in = 300;
    EXPECT(vnplug_backend_register(&options, error, sizeof error, &backend) == VNPLUG_E_INVALID);
    options.events_in = 4;
    options.events_out = 4;
    options.version = 7;
    EXPECT(vnplug_backend_register(&options, error, sizeof error, &backend) == VNPLUG_OK);
    EXPECT(vnplug_backend_register(&options, error, sizeof error, &second) == VNPLUG_E_REFUSED && !second);
    say("registered");

    vnplug_news_init(&news);
    EXPECT(vnplug_backend_next(NULL, 0, &news) == VNPLUG_E_INVALID);
    EXPECT(vnplug_backend_next(backend, 0, NULL) == VNPLUG_E_INVALID);
    channel = joined(backend, &news);
    EXPECT(vnplug_backend_next(backend, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_MESSAGE);
    EXPECT(news.len == 5 && memcmp(news.bytes, "hello", 5) == 0 && news.channel == channel);
    /* Said back from where it lies. */
    EXPECT(vnplug_backend_send(backend, channel, news.bytes, news.len) == VNPLUG_OK);
    EXPECT(vnplug_backend_send(backend, channel, big, VNPLUG_MAX_SAID) == VNPLUG_OK);
    EXPECT(vnplug_backend_send(backend, channel, big, sizeof big) == VNPLUG_E_INVALID);
    EXPECT(vnplug_backend_send(backend, channel, NULL, 1) == VNPLUG_E_INVALID);
    EXPECT(vnplug_backend_send(backend, channel + 1, "x", 1) == VNPLUG_E_INVALID);
    EXPECT(strlen(vnplug_backend_last_error(backend)) > 0);

    /* A program that was compiled with a struct of an older header gets its part. */
    *(size_t *)early = sizeof(size_t);
    EXPECT(vnplug_backend_next(backend, SOON, (struct vnplug_news *)early) == 1);
    free(early);

    EXPECT(vnplug_backend_share(backend, channel, 1, 0, &region) == VNPLUG_OK);
    EXPECT(vnplug_backend_share(backend, channel, 1, 1, &both) == VNPLUG_OK && both != region);
    EXPECT(vnplug_backend_share(backend, channel, 1 << 30, 1, &both) == VNPLUG_E_LIMIT);
    publish(backend, region, "written by the host");
    EXPECT(vnplug_backend_event(backend, channel, 3, 5) == VNPLUG_OK);
    EXPECT(vnplug_backend_event(backend, channel, 4, 1) == VNPLUG_E_INVALID);
    EXPECT(vnplug_backend_event(backend, channel, 400, 1) == VNPLUG_E_INVALID);
    EXPECT(vnplug_backend_next(backend, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_MESSAGE);
    EXPECT(vnplug_backend_memory(backend, both, &memory) == VNPLUG_OK && memory.data[4095] == 42);
    EXPECT(vnplug_backend_withdraw(backend, region, SOON) == 1);
    EXPECT(vnplug_backend_memory(backend, region, &memory) == VNPLUG_E_INVALID);
    EXPECT(vnplug_backend_withdraw(backend, both, 100) == 0);
    EXPECT(vnplug_backend_hang_up(backend, channel, "that is all") == VNPLUG_OK);

    /* It connects again by itself; then the daemon goes and comes. */
    channel = joined(backend, &news);
    say("again");
    EXPECT(vnplug_backend_next(backend, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_LEFT);
    EXPECT(news.channel == channel && strlen(news.text) > 0);
    EXPECT(vnplug_backend_next(backend, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_GONE);
    EXPECT(vnplug_backend_next(backend, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_BACK);
    EXPECT(vnplug_backend_next(backend, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_JOINED);
    /* Floods a program that takes nothing: bounded, and told. */
    for (int i = 0; i < 4; i++)
        EXPECT(vnplug_backend_send(backend, news.channel, big, 60000) == VNPLUG_OK);
    EXPECT(vnplug_backend_send(backend, news.channel, big, 60000) == VNPLUG_E_FULL);
    say("full");
    EXPECT(vnplug_backend_next(backend, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_LEFT);
    vnplug_backend_close(backend);
    vnplug_backend_close(NULL);
}

static void use(void)
{
    struct vnplug_channel_options options;
    struct vnplug_backend_info *all;
    struct vnplug_news news;
    struct vnplug_memory memory;
    vnplug_channel *channel = (vnplug_channel *)&channel;
    uint32_t page = 0, both = 0;
    size_t count;

    EXPECT(vnplug_backends(NULL, error, sizeof error, &all, &count) == VNPLUG_OK && count == 1);
    EXPECT(strcmp(all->name, "kv") == 0 && all->id == 85 && all->is_there && all->version == 7);
    vnplug_backends_free(all, count);
    EXPECT(vnplug_backends("/nowhere", error, sizeof error, &all, &count) == VNPLUG_E_UNREACHABLE && !all);

    vnplug_channel_options_init(&options);
    EXPECT(vnplug_channel_open(&options, error, sizeof error, &channel) == VNPLUG_E_INVALID && !channel);
    options.name = "none";
    EXPECT(vnplug_channel_open(&options, error, sizeof error, &channel) == VNPLUG_E_NOT_FOUND);
    options.name = NULL;
    options.id = 85;
    options.version = 2;
    options.label = "in C";
    EXPECT(vnplug_channel_open(&options, error, sizeof error, &channel) == VNPLUG_OK);
    EXPECT(vnplug_channel_version(channel) == 7);
    vnplug_news_init(&news);
    EXPECT(vnplug_channel_next(channel, 10, &news) == 0 && news.kind == VNPLUG_NEWS_NONE);
    EXPECT(vnplug_channel_send(channel, "hello", 5) == VNPLUG_OK);
    struct pollfd pollfd = {.fd = vnplug_channel_fd(channel), .events = POLLIN};
    EXPECT(poll(&pollfd, 1, SOON) == 1);
    EXPECT(vnplug_channel_next(channel, 0, &news) == 1 && news.kind == VNPLUG_NEWS_MESSAGE);
    EXPECT(news.len == 5 && memcmp(news.bytes, "hello", 5) == 0);
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.len == VNPLUG_MAX_SAID);
    EXPECT(vnplug_channel_event(channel, 1, 3) == VNPLUG_OK);
    EXPECT(vnplug_channel_event(channel, 4, 3) == VNPLUG_E_INVALID);

    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_SHARED);
    page = news.region;
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_SHARED);
    both = news.region;
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_EVENT);
    EXPECT(news.event == 3 && news.count == 5);
    EXPECT(vnplug_channel_memory(channel, page, &memory) == VNPLUG_OK && !memory.writable);
    EXPECT(__atomic_load_n((uint64_t *)memory.data, __ATOMIC_ACQUIRE) == 2);
    EXPECT(memcmp((const void *)(memory.data + 8), "written by the host", 20) == 0);
    EXPECT(vnplug_channel_memory(channel, both, &memory) == VNPLUG_OK && memory.writable);
    memory.data[4095] = 42;
    EXPECT(vnplug_channel_send(channel, NULL, 0) == VNPLUG_OK);
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_WITHDRAW);
    EXPECT(news.region == page && news.within_ms == SOON);
    EXPECT(vnplug_channel_release(channel, page) == VNPLUG_OK);
    EXPECT(vnplug_channel_release(channel, page) == VNPLUG_E_INVALID);
    /* The other one is kept: it becomes zeros. */
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_WITHDRAW);
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_GONE);
    EXPECT(strstr(news.text, "that is all") != NULL);
    EXPECT(vnplug_channel_send(channel, "x", 1) == VNPLUG_E_DISCONNECTED);
    EXPECT(vnplug_channel_version(channel) == 0);
    EXPECT(vnplug_channel_memory(channel, both, &memory) == VNPLUG_OK && memory.data[4095] == 0);
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_BACK);
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_GONE);
    EXPECT(vnplug_channel_next(channel, SOON, &news) == 1 && news.kind == VNPLUG_NEWS_BACK);
    say("back");
    getchar();
    vnplug_channel_close(channel);
    vnplug_channel_close(NULL);
}

int main(int argc, char **argv)
{
    mode = argc > 1 ? argv[1] : "";
    if (strcmp(mode, "serve") == 0)
        serve();
    else
        use();
    say("over");
    return 0;
}
