//! A hash and an array per CPU that the kernel's instance of a program and the daemon's share, whole: a program in C with the maps
//! as libbpf declares them, real frames, and what bpftool and the command show of it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::process::Command;

use serde_json::Value;
use vnplug::{Client, Next};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::third_party::build_bpf;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::Deadline;

const FLOWS: u32 = 16;
const FRAMES: u64 = 4_800;
/// Entries that are asked for at once.
const LOT: u32 = 256;

/// Counts frames by source address, and all of them on each CPU.
const PROGRAM: &str = r#"
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <bpf/bpf_helpers.h>
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 1024);
    __type(key, __u32);
    __type(value, __u64);
} senders SEC(".maps");
struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, 1);
    __type(key, __u32);
    __type(value, __u64);
} total SEC(".maps");
SEC("xdp")
int senders_of(struct xdp_md *ctx)
{
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    struct iphdr *ip = data + sizeof(struct ethhdr);
    __u32 zero = 0, from;
    __u64 one = 1, *count;
    if ((void *)(ip + 1) > end)
        return XDP_PASS;
    count = bpf_map_lookup_elem(&total, &zero);
    if (count)
        *count += 1;
    from = ip->saddr;
    count = bpf_map_lookup_elem(&senders, &from);
    if (count)
        __sync_fetch_and_add(count, 1);
    else if (bpf_map_update_elem(&senders, &from, &one, BPF_NOEXIST)) {
        count = bpf_map_lookup_elem(&senders, &from);
        if (count)
            __sync_fetch_and_add(count, 1);
    }
    return XDP_PASS;
}
char _license[] SEC("license") = "GPL";
"#;

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The keys and values of slots of the hash, each state, key and value (`docs/programs.md`); what is before the key has `head`
/// bytes.
fn full(slots: &[u8], head: usize) -> impl Iterator<Item = (u32, u64)> {
    let slots = slots.chunks_exact(head + 16);
    let full = slots.filter(|slot| long(slot, 0) & 3 == 2);
    full.map(move |slot| (long(slot, head) as u32, long(slot, head + 8)))
}

/// All entries of a map.
fn entries(client: &mut Client, map: &str, count: u32) -> Vec<Vec<u8>> {
    let lots = (0..count).step_by(LOT as usize);
    lots.flat_map(|first| {
        client
            .program_map("senders", map, first, LOT.min(count - first))
            .unwrap()
    })
    .collect()
}

#[test]
fn the_kernel_and_the_daemon_count_in_one_hash_and_each_cpu_in_its_place() {
    counts_in("BPF_MAP_TYPE_HASH", 8);
}

#[test]
fn the_kernel_and_the_daemon_count_in_one_hash_that_forgets() {
    counts_in("BPF_MAP_TYPE_LRU_HASH", 16);
}

fn counts_in(kind: &str, head: usize) {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let source = lab.dir().join("senders.c");
    let text = PROGRAM.replace("BPF_MAP_TYPE_HASH", kind);
    std::fs::write(&source, text).unwrap();
    let object = build_bpf(&source, lab.dir()).unwrap();
    let program = format!("senders={},attach=xdp:wire1", object.display());
    let args = ["--source", "wire1", "--program", &program];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let open = daemon.port("wire1").program("senders").ring_bytes(8 << 20);
    let mut port = open.open().unwrap();
    let stream = Stream {
        flows: FLOWS,
        pps: NonZeroU64::new(20_000),
        ..Stream::new("wire0", FRAMES)
    };
    netns.enter(|| stream.send()).unwrap().unwrap();
    let deadline = Deadline::new("the frames come");
    let mut left = FRAMES;
    while left > 0 {
        deadline.check_seen(&left);
        match port.next().unwrap() {
            Next::Packet(_) => left -= 1,
            _ => drop(
                port.wait(Some(std::time::Duration::from_millis(50)))
                    .unwrap(),
            ),
        }
    }

    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let all = client.programs().unwrap();
    let map = |name: &str| all[0].maps.iter().find(|it| it.name == name).unwrap();
    let (senders, total) = (map("senders"), map("total"));
    // Each frame once by either instance.
    let slots = entries(&mut client, "senders", senders.entries);
    let found: BTreeMap<u32, u64> = slots.iter().flat_map(|slot| full(slot, head)).collect();
    assert_eq!(found.len(), FLOWS as usize, "{found:?}");
    let each = 2 * FRAMES / u64::from(FLOWS);
    assert!(found.values().all(|&count| count == each), "{found:?}");
    // By the kernel on its CPUs, by the daemon in one place behind them.
    let places = entries(&mut client, "total", total.entries);
    let places: Vec<u64> = places.iter().map(|entry| long(entry, 0)).collect();
    let (cpus, seats) = places.split_at(places.len() - 32);
    assert_eq!(cpus.iter().sum::<u64>(), FRAMES, "{places:?}");
    let seat = seats.iter().position(|&count| count > 0).unwrap();
    let of_all: u64 = seats.iter().sum();
    assert_eq!((seats[seat], of_all), (FRAMES, FRAMES), "{places:?}");

    // bpftool sees the same memory, as a map of the kernel.
    let id = senders.id.to_string();
    let output = Command::new("bpftool")
        .args(["map", "dump", "id", &id, "-j"])
        .output()
        .unwrap();
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    let byte =
        |it: &Value| u8::from_str_radix(it.as_str().unwrap().trim_start_matches("0x"), 16).unwrap();
    let dumped: Vec<Vec<u8>> = seen
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| {
            entry["value"]
                .as_array()
                .unwrap()
                .iter()
                .map(byte)
                .collect()
        })
        .collect();
    // How many keys there are, then buckets, each a lock and its slots.
    assert_eq!(long(&dumped[0], 0), u64::from(FLOWS));
    let buckets = dumped[1..].iter();
    let dumped: BTreeMap<u32, u64> = buckets
        .flat_map(|bucket| full(&bucket[head..], head))
        .collect();
    assert_eq!(dumped, found);
    let seat = (cpus.len() + seat).to_string();
    let words = [
        "programs", "senders", "--map", "total", "--first", &seat, "--count", "1",
    ];
    let (code, text) = daemon.vnplug(&words);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains(&FRAMES.to_string()), "{text}");
    daemon.audit();
}
