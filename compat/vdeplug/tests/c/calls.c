/* Calls libvdeplug as programs do: what an address promises that is not a socket. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libvdeplug.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                                    \
	do {                                                                           \
		if (!(what)) {                                                         \
			fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strerror(errno)); \
			exit(1);                                                       \
		}                                                                      \
	} while (0)

enum { LEN = 100, COUNT = 20000 };

static VDECONN *joined(char *url)
{
	struct vde_open_args args = {.port = 0, .group = NULL, .mode = 0700};
	VDECONN *conn = vde_open(url, "calls", &args);
	CHECK(conn != NULL);
	CHECK(vde_datafd(conn) >= 0 && vde_ctlfd(conn) >= 0);
	return conn;
}

/* A frame for all, with a number. */
static void fill(unsigned char *frame, uint32_t number)
{
	memset(frame, 0, LEN);
	memset(frame, 0xff, 6);
	frame[6] = 2;
	frame[12] = 0x88, frame[13] = 0xb5;
	memcpy(frame + 14, &number, sizeof number);
}

static ssize_t sent(VDECONN *conn, uint32_t number, int flags)
{
	unsigned char frame[LEN];
	fill(frame, number);
	return vde_send(conn, frame, LEN, flags);
}

static uint32_t number_of(const unsigned char *frame)
{
	uint32_t number;
	memcpy(&number, frame + 14, sizeof number);
	return number;
}

static int is_readable(int fd, int ms)
{
	struct pollfd pollfd = {.fd = fd, .events = POLLIN};
	CHECK(poll(&pollfd, 1, ms) >= 0);
	CHECK((pollfd.revents & ~POLLIN) == 0);
	return pollfd.revents != 0;
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* Nothing is there; a ring may come late, for a frame that was taken already. */
static void is_quiet(VDECONN *conn, int ms)
{
	unsigned char frame[LEN];
	while (is_readable(vde_datafd(conn), ms))
		CHECK(vde_recv(conn, frame, LEN, 0) == 1);
}

/* The frame that comes next. */
static ssize_t received(VDECONN *conn, unsigned char *frame, size_t size)
{
	for (;;) {
		CHECK(is_readable(vde_datafd(conn), 10000));
		ssize_t len = vde_recv(conn, frame, size, 0);
		if (len != 1 && !(len == -1 && errno == EAGAIN))
			return len;
	}
}

static void readable(char *url)
{
	VDECONN *one = joined(url), *two = joined(url);
	unsigned char frame[LEN * 2];
	for (uint32_t round = 0; round < 200; round++) {
		uint32_t count = round % 7 + 1;
		is_quiet(two, 0);
		for (uint32_t at = 0; at < count; at++)
			CHECK(sent(one, round * 10 + at, 0) == LEN);
		for (uint32_t at = 0; at < count; at++) {
			CHECK(received(two, frame, sizeof frame) == LEN);
			CHECK(number_of(frame) == round * 10 + at);
		}
	}
	/* Room for less, as recv(2). */
	CHECK(sent(one, 77, 0) == LEN);
	CHECK(received(two, frame, 20) == 20 && number_of(frame) == 77);
	is_quiet(two, 50);
	CHECK(!is_readable(vde_ctlfd(two), 0));
	/* What is no frame is the switch's to drop, and harms nobody. */
	for (size_t len = 0; len < 14; len++)
		CHECK(vde_send(one, frame, len, 0) == (ssize_t)len);
	CHECK(vde_send(one, NULL, 0, 0) == -1 && errno == EFAULT);
	CHECK(vde_recv(two, NULL, 0, MSG_DONTWAIT) == -1 && errno == EFAULT);
	CHECK(sent(one, 78, 0) == LEN);
	CHECK(received(two, frame, sizeof frame) == LEN && number_of(frame) == 78);
	static unsigned char huge[1 << 20];
	CHECK(vde_send(one, huge, sizeof huge, 0) == -1 && errno == EMSGSIZE);
	CHECK(vde_close(one) == 0 && vde_close(two) == 0);
}

static void *later(void *conn)
{
	usleep(200000);
	CHECK(sent(conn, 5, 0) == LEN);
	return NULL;
}

static void waits(char *url)
{
	VDECONN *one = joined(url), *two = joined(url);
	unsigned char frame[LEN];
	CHECK(vde_recv(two, frame, LEN, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	pthread_t thread;
	double start = now();
	CHECK(pthread_create(&thread, NULL, later, one) == 0);
	/* Nothing has come on this connection: no ring can be late. */
	CHECK(vde_recv(two, frame, LEN, 0) == LEN && number_of(frame) == 5);
	CHECK(now() - start > 0.1);
	pthread_join(thread, NULL);
	int fd = vde_datafd(two);
	CHECK(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0);
	CHECK(vde_recv(two, frame, LEN, 0) == -1 && errno == EAGAIN);
	CHECK(sent(one, 6, 0) == LEN);
	CHECK(received(two, frame, LEN) == LEN && number_of(frame) == 6);
	CHECK(vde_recv(two, frame, LEN, 0) == -1 && errno == EAGAIN);
	CHECK(vde_close(one) == 0 && vde_close(two) == 0);
}

static void *sends(void *conn)
{
	for (uint32_t at = 1; at <= COUNT; at++)
		CHECK(sent(conn, at, 0) == LEN);
	/* Until the other side has had enough. */
	for (int at = 0; at < 100; at++) {
		CHECK(sent(conn, COUNT + 1, 0) == LEN);
		usleep(20000);
	}
	return NULL;
}

static void *receives(void *conn)
{
	unsigned char frame[LEN];
	uint32_t last = 0;
	while (last <= COUNT) {
		CHECK(received(conn, frame, LEN) == LEN && number_of(frame) > last);
		last = number_of(frame);
	}
	return NULL;
}

static void threads(char *url)
{
	VDECONN *conns[2] = {joined(url), joined(url)};
	pthread_t threads[4];
	for (int at = 0; at < 2; at++) {
		CHECK(pthread_create(&threads[at], NULL, sends, conns[at]) == 0);
		CHECK(pthread_create(&threads[2 + at], NULL, receives, conns[at]) == 0);
	}
	for (int at = 0; at < 4; at++)
		pthread_join(threads[at], NULL);
	CHECK(vde_close(conns[0]) == 0 && vde_close(conns[1]) == 0);
}

/* Stops a process: on a busy machine its threads go on for a while after the signal. */
static void stop(pid_t pid)
{
	CHECK(kill(pid, SIGSTOP) == 0);
	char path[300], state;
	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	DIR *tasks = opendir(path);
	CHECK(tasks != NULL);
	for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
		if (task->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/proc/%d/task/%s/stat", pid, task->d_name);
		double start = now();
		do {
			CHECK(now() - start < 20);
			FILE *stat = fopen(path, "r");
			CHECK(stat != NULL && fscanf(stat, "%*[^)]) %c", &state) == 1);
			fclose(stat);
		} while (state != 'T');
	}
	closedir(tasks);
}

/* How often this thread has slept. */
static long sleeps(void)
{
	struct rusage usage;
	CHECK(getrusage(RUSAGE_THREAD, &usage) == 0);
	return usage.ru_nvcsw;
}

static void full(char *url, pid_t daemon)
{
	VDECONN *conn = joined(url);
	stop(daemon);
	long count = 0;
	while (sent(conn, 1, MSG_DONTWAIT) == LEN)
		CHECK(++count < 100000);
	CHECK(errno == EAGAIN);
	double start = now();
	long slept = sleeps();
	CHECK(sent(conn, 1, 0) == -1 && errno == ENOBUFS);
	CHECK(now() - start > 0.05 && now() - start < 5);
	/* Each look takes the processor from who makes room: they are few. */
	CHECK(sleeps() - slept <= 30);
	start = now();
	for (int at = 0; at < 1000; at++)
		CHECK(sent(conn, 1, 0) == -1 && errno == ENOBUFS);
	CHECK(now() - start < 5);
	CHECK(kill(daemon, SIGCONT) == 0);
	start = now();
	while (sent(conn, 1, 0) != LEN) {
		CHECK(now() - start < 20);
		usleep(1000);
	}
	CHECK(vde_close(conn) == 0);
}

static void gone(char *url)
{
	VDECONN *conn = joined(url);
	unsigned char frame[LEN];
	struct pollfd fds[2] = {
		{.fd = vde_datafd(conn), .events = POLLIN},
		{.fd = vde_ctlfd(conn), .events = POLLIN},
	};
	double start = now();
	for (;;) {
		CHECK(poll(fds, 2, 60000) > 0 && now() - start < 60);
		if (fds[1].revents != 0)
			break;
		CHECK(fds[0].revents == POLLIN);
		ssize_t len = vde_recv(conn, frame, LEN, 0);
		CHECK(len == 1 || (len == -1 && errno == ENOTCONN));
	}
	CHECK(read(vde_ctlfd(conn), frame, 1) == 0);
	CHECK(!is_readable(vde_datafd(conn), 50));
	CHECK(vde_recv(conn, frame, LEN, 0) == -1 && errno == ENOTCONN);
	CHECK(sent(conn, 1, 0) == -1 && errno == ENOTCONN);
	CHECK(vde_close(conn) == 0);
}

int main(int argc, char **argv)
{
	CHECK(argc >= 3);
	if (strcmp(argv[1], "readable") == 0)
		readable(argv[2]);
	else if (strcmp(argv[1], "waits") == 0)
		waits(argv[2]);
	else if (strcmp(argv[1], "threads") == 0)
		threads(argv[2]);
	else if (strcmp(argv[1], "full") == 0 && argc == 4)
		full(argv[2], atoi(argv[3]));
	else if (strcmp(argv[1], "gone") == 0)
		gone(argv[2]);
	else
		CHECK(!"a known test");
	puts("ok");
	return 0;
}
