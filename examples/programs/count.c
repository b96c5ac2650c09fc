/* Counts frames and bytes by what they carry, and lets all of them pass.
 *
 *     clang -O2 -g -target bpf -I /usr/include/$(uname -m)-linux-gnu -c count.c -o count.o
 *     vnplugd --source eth1 --program count=count.o,attach=xdp:eth1
 *     vnplug programs count --map packets
 *
 * The kernel counts what comes by, the daemon what it gives to ports with --program count: both in the same
 * memory, so the sum is exact.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* By the protocol of IPv4 (RFC 791); 255: what is no IPv4. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 256);
    __type(key, __u32);
    __type(value, __u64);
} packets SEC(".maps"), bytes SEC(".maps");

static __always_inline void add(void *map, __u32 key, __u64 what)
{
    __u64 *value = bpf_map_lookup_elem(map, &key);
    if (value)
        __sync_fetch_and_add(value, what);
}

SEC("xdp")
int count(struct xdp_md *ctx)
{
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    struct ethhdr *ethernet = data;
    struct iphdr *ip = (void *)(ethernet + 1);
    __u32 kind = 255;

    if ((void *)(ip + 1) <= end && ethernet->h_proto == bpf_htons(ETH_P_IP))
        kind = ip->protocol;
    add(&packets, kind, 1);
    add(&bytes, kind, end - data);
    return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
