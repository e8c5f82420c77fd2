/* A streaming chat server that answers at once, or at a fixed pace: what a client's own cost is measured against.
 *
 * usage: instant PORT TOKENS [DELAY_US [FIRST_US]] [--log FILE]
 * PORT 0 lets the system choose; the port is printed as "listening PORT". Any POST gets TOKENS chunks of one event each, shaped as
 * vLLM writes them, then a finish event, a usage event and [DONE]. With DELAY_US each token waits that long after the one before
 * (FIRST_US, else DELAY_US, before the first), on one timerfd. GET /stats: connections, requests, in flight now and at most, as JSON;
 * GET /v1/models and /version: what a client asks before a run. --log: one line per request, "received first done" in nanoseconds
 * of CLOCK_MONOTONIC: the whole request read, the first token written, the last byte written. One thread, epoll, keep-alive.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 20000, HEAD_MAX = 16384, READ_SIZE = 1 << 18 };

typedef struct {
    int open, busy;
    char head[HEAD_MAX];
    size_t head_len;
    long body_left;               /* bytes of the request's body still to come */
    const char *reply;            /* what is being written, and how far */
    size_t reply_len, written;
    size_t limit;                 /* how far it may be written by now (pacing) */
    int sent_tokens;
    int64_t due, received, first;
} Connection;

static Connection *connections[MAX_CONNECTIONS];
static int heap[MAX_CONNECTIONS], heap_len;   /* descriptors whose next token is due, by due time */
static char *stream, models[512], version[256], stats[512], read_buffer[READ_SIZE];
static size_t stream_len, *token_end;         /* token_end[i]: length of the stream up to and with token i */
static int poller, timer, tokens;
static int64_t delay_ns, first_ns;
static long accepted, requests, in_flight, max_in_flight;
static FILE *log_file;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static size_t chunk(char *to, const char *data) { return sprintf(to, "%zx\r\n%s\r\n", strlen(data), data); }

static void build_stream(void) {
    const char *event = "data: {\"id\":\"chatcmpl-a9e5378599b2dabc\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                        "\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":%s,\"logprobs\":null,\"finish_reason\":%s,"
                        "\"token_ids\":null}]}\n\n";
    char data[1024];
    stream = malloc(2048 + (size_t)(tokens + 4) * 512);
    token_end = malloc((tokens + 1) * sizeof *token_end);
    char *to = stream + sprintf(stream, "HTTP/1.1 200 OK\r\nserver: instant\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                        "transfer-encoding: chunked\r\n\r\n");
    sprintf(data, event, "{\"role\":\"assistant\",\"content\":\"\"}", "null");
    to += chunk(to, data);
    for (int i = 0; i < tokens; i++) {
        sprintf(data, event, "{\"content\":\" token\"}", "null");
        to += chunk(to, data);
        token_end[i] = to - stream;
    }
    sprintf(data, event, "{}", "\"length\"");
    to += chunk(to, data);
    sprintf(data, "data: {\"id\":\"chatcmpl-a9e5378599b2dabc\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\","
                  "\"choices\":[],\"usage\":{\"prompt_tokens\":32,\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n", 32 + tokens, tokens);
    to += chunk(to, data);
    to += chunk(to, "data: [DONE]\n\n");
    to += sprintf(to, "0\r\n\r\n");
    stream_len = to - stream;
}

static void json_reply(char *to, const char *json) {
    sprintf(to, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(json), json);
}

static int earlier(int a, int b) { return connections[heap[a]]->due < connections[heap[b]]->due; }
static void swap(int a, int b) { int t = heap[a]; heap[a] = heap[b]; heap[b] = t; }

static void heap_push(int fd) {
    int i = heap_len++;
    heap[i] = fd;
    for (; i && earlier(i, (i - 1) / 2); i = (i - 1) / 2) swap(i, (i - 1) / 2);
}

static int heap_pop(void) {
    int top = heap[0];
    heap[0] = heap[--heap_len];
    for (int i = 0;;) {
        int child = 2 * i + 1;
        if (child >= heap_len) break;
        if (child + 1 < heap_len && earlier(child + 1, child)) child++;
        if (!earlier(child, i)) break;
        swap(i, child);
        i = child;
    }
    return top;
}

static void heap_remove(int fd) {
    for (int i = 0; i < heap_len; i++)
        if (heap[i] == fd) {
            int64_t due = connections[fd]->due;
            connections[fd]->due = INT64_MIN;
            for (; i; i = (i - 1) / 2) swap(i, (i - 1) / 2);
            heap_pop();
            connections[fd]->due = due;
            return;
        }
}

static void arm(void) {
    struct itimerspec spec = {0};
    if (heap_len) {
        int64_t due = connections[heap[0]]->due;
        spec.it_value.tv_sec = due / 1000000000;
        spec.it_value.tv_nsec = due % 1000000000;
    }
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &spec, NULL);
}

static void hang_up(int fd) {
    Connection *c = connections[fd];
    if (c->busy) { in_flight--; heap_remove(fd); arm(); }
    c->open = c->busy = 0;
    close(fd);
}

/* Write what may be written by now. */
static void push(int fd) {
    Connection *c = connections[fd];
    while (c->written < c->limit) {
        ssize_t n = write(fd, c->reply + c->written, c->limit - c->written);
        if (n < 0) {
            if (errno == EAGAIN) return;          /* EPOLLOUT, edge-triggered, comes back here */
            hang_up(fd);
            return;
        }
        if (!c->first && c->reply == stream) c->first = now_ns();
        c->written += n;
    }
    if (c->busy && c->written == c->reply_len) {
        if (c->reply == stream) {
            in_flight--;
            if (log_file) { fprintf(log_file, "%ld %ld %ld\n", c->received, c->first, now_ns()); fflush(log_file); }
        }
        c->busy = 0;
    }
}

static void next_token(int fd) {
    Connection *c = connections[fd];
    c->limit = token_end[c->sent_tokens++];
    if (c->sent_tokens == tokens) c->limit = stream_len;
    else { c->due += delay_ns; heap_push(fd); }
    push(fd);
}

static void answer(int fd) {
    Connection *c = connections[fd];
    c->busy = 1;
    c->written = 0;
    if (!strncmp(c->head, "POST", 4)) {
        requests++;
        if (++in_flight > max_in_flight) max_in_flight = in_flight;
        c->reply = stream;
        c->reply_len = stream_len;
        c->first = 0;
        if (log_file || delay_ns || first_ns) c->received = now_ns();
        if ((delay_ns || first_ns) && tokens) {
            c->sent_tokens = 0;
            c->limit = 0;
            c->due = c->received + first_ns;
            heap_push(fd);
            arm();
            return;
        }
    } else {
        char json[256];
        sprintf(json, "{\"connections\":%ld,\"requests\":%ld,\"in_flight\":%ld,\"max_in_flight\":%ld}", accepted, requests, in_flight, max_in_flight);
        json_reply(stats, json);
        c->reply = strstr(c->head, "/stats") ? stats : strstr(c->head, "/v1/models") ? models : version;
        c->reply_len = strlen(c->reply);
    }
    c->limit = c->reply_len;
    push(fd);
    if (c->busy && c->reply != stream) c->busy = 0;
}

/* Feed request bytes: heads are collected, bodies only counted. */
static void feed(int fd, const char *data, size_t n) {
    Connection *c = connections[fd];
    while (n && c->open) {
        if (c->body_left) {
            size_t take = n < (size_t)c->body_left ? n : (size_t)c->body_left;
            c->body_left -= take; data += take; n -= take;
        } else {
            size_t room = HEAD_MAX - 1 - c->head_len, take = n < room ? n : room, before = c->head_len;
            if (!take) { hang_up(fd); return; }
            memcpy(c->head + before, data, take);
            c->head[before + take] = 0;
            char *end = strstr(c->head + (before > 3 ? before - 3 : 0), "\r\n\r\n");
            if (!end) { c->head_len += take; return; }
            size_t used = end + 4 - (c->head + before);
            data += used; n -= used;
            end[2] = 0;
            char *length = strcasestr(c->head, "\r\ncontent-length:");
            c->body_left = length ? atol(length + 17) : 0;
            c->head_len = 0;
        }
        if (!c->body_left) answer(fd);
    }
}

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_CONNECTIONS) { close(fd); continue; }
        if (!connections[fd]) connections[fd] = malloc(sizeof(Connection));
        memset(connections[fd], 0, sizeof(Connection));
        connections[fd]->open = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
        accepted++;
    }
}

static void read_all(int fd) {
    while (connections[fd]->open) {
        ssize_t n = read(fd, read_buffer, READ_SIZE);
        if (n > 0) feed(fd, read_buffer, n);
        else if (n < 0 && errno == EAGAIN) return;
        else { hang_up(fd); return; }
        if (n < READ_SIZE) return;
    }
}

static void tick(void) {
    uint64_t fired;
    if (read(timer, &fired, sizeof fired) < 0) return;
    int64_t now = now_ns();
    while (heap_len && connections[heap[0]]->due <= now) next_token(heap_pop());
    arm();
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&address, length) || listen(fd, 4096)) { perror("instant: listen"); exit(1); }
    getsockname(fd, (struct sockaddr *)&address, &length);
    printf("listening %d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

int main(int argc, char **argv) {
    const char *number[4] = {0};
    int given = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--log") && i + 1 < argc) log_file = fopen(argv[++i], "w");
        else if (given < 4) number[given++] = argv[i];
    }
    if (given < 2) { fprintf(stderr, "usage: instant PORT TOKENS [DELAY_US [FIRST_US]] [--log FILE]\n"); return 2; }
    tokens = atoi(number[1]);
    delay_ns = given > 2 ? atol(number[2]) * 1000 : 0;
    first_ns = given > 3 ? atol(number[3]) * 1000 : delay_ns;
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    build_stream();
    json_reply(models, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"owned_by\":\"instant\",\"max_model_len\":8192}]}");
    json_reply(version, "{\"version\":\"instant-1\"}");
    int listener = listen_on(atoi(number[0]));
    poller = epoll_create1(0);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    event.data.fd = timer;
    epoll_ctl(poller, EPOLL_CTL_ADD, timer, &event);
    for (;;) {
        int n = epoll_wait(poller, ready, 256, -1);
        for (int i = 0; i < n; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) accept_all(listener);
            else if (fd == timer) tick();
            else if (connections[fd]->open) {
                if (ready[i].events & EPOLLOUT) push(fd);
                if (connections[fd]->open && ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_all(fd);
            }
        }
    }
}
