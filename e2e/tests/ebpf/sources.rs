//! Programs of a source: in the kernel where it can run them, and in the daemon where not.

use super::*;

/// The source's counters.
fn source(daemon: &Daemon, name: &str) -> u64 {
    let all = daemon.counters();
    let source = all.iter().find(|it| it.kind == "source").unwrap();
    value(source, name)
}

#[test]
fn of_a_source_the_kernel_runs_it_where_it_can_and_the_daemon_where_not() {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let object = example_bpf("first.c", lab.dir()).unwrap();
    let program = flag("first", &object, "");
    // By XDP and, as the control of what the daemon does instead, by packet sockets.
    for (kind, in_kernel) in [("af_xdp", true), ("af_packet", false)] {
        let spec = format!("wire1={kind},program=first");
        let args = ["--source", &spec, "--program", &program];
        let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
        let mut port = daemon.port("wire1").open().unwrap();
        let stream = Stream {
            flows: 4,
            pps: NonZeroU64::new(20_000),
            ..Stream::new("wire0", 1_000)
        };
        netns.enter(|| stream.send()).unwrap().unwrap();
        let dropped = until(
            "all frames went through the program",
            || source(&daemon, "program"),
            |dropped| [960, 970, 980, 990].contains(dropped),
        );
        let passed = 1_000 - dropped;
        assert_eq!(read(&mut port, passed as usize).len() as u64, passed);
        let mut client = Client::connect_to(&daemon.socket()).unwrap();
        assert_eq!(number(&mut client, "first", ".bss", 0), dropped, "{kind}");
        let runs = &client.programs().unwrap()[0].runs;
        match in_kernel {
            true => assert_eq!(runs[..], ["xdp:wire1 source wire1"]),
            false => assert!(runs.is_empty(), "{runs:?}"),
        }
        // With XDP what was dropped never came to the daemon.
        let listed = netns.exec(&["ip", "-d", "link", "show", "wire1"]).unwrap();
        assert_eq!(listed.contains("xdp"), in_kernel, "{listed}");
        daemon.audit();
    }
    let wrong = complaint(&lab, "other=/nowhere.o");
    assert!(wrong.contains("/nowhere.o"), "{wrong}");
    let args = ["--source", "lab=gen,size=60,count=1,program=nothing"];
    let error = Daemon::start(&lab, None, &args).err().unwrap().to_string();
    assert!(error.contains("no program is named \"nothing\""), "{error}");
}

#[test]
fn of_a_source_it_is_told_the_interface_also_of_one_that_is_made_again() {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let path = lab.dir().join("where.c");
    let text = "#include <linux/bpf.h>\n#include <bpf/bpf_helpers.h>\n\
                struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 256); __type(key, __u32); \
                __type(value, __u64); } seen SEC(\".maps\");\n\
                SEC(\"xdp\") int where(struct xdp_md *ctx) { __u32 at = ctx->ingress_ifindex & 255; \
                __u64 *n = bpf_map_lookup_elem(&seen, &at); if (n) __sync_fetch_and_add(n, 1); return XDP_PASS; }\n\
                char _license[] SEC(\"license\") = \"GPL\";\n";
    std::fs::write(&path, text).unwrap();
    let object = build_bpf(&path, lab.dir()).unwrap();
    let program = flag("where", &object, "");
    let args = [
        "--source",
        "wire1=af_packet,program=where",
        "--program",
        &program,
    ];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut before = 0;
    for _ in 0..2 {
        let index = netns
            .exec(&["cat", "/sys/class/net/wire1/ifindex"])
            .unwrap();
        let index = index.trim().parse::<u32>().unwrap();
        assert_ne!(index, before);
        before = index;
        let look = || daemon.vnplug(&["list"]).1;
        until("the source is up", look, |text| text.contains(" up"));
        netns
            .enter(|| Stream::new("wire0", 100).send())
            .unwrap()
            .unwrap();
        let count = || number(&mut client, "where", "seen", index & 255);
        until("all were seen there", count, |seen| *seen >= 100);
        netns.ip(&["link", "del", "wire1"]).unwrap();
        until("the source is gone", look, |text| text.contains(" gone"));
        netns.veth("wire0", "wire1").unwrap();
    }
}
