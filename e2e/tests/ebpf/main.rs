//! The operator's eBPF programs: compiled by clang, verified by the kernel, run there and in the daemon on one
//! map, asked for by ports, seen by those who may.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod sources;

use std::num::NonZeroU64;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vnplug::{Client, Next, Port};
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::third_party::{build_bpf, example_bpf};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_frame::witness::seed;
use vnplug_testing::{Deadline, Dice, PATIENCE, until};
use vnplug_twin::{Meta, Object, Program};

/// Reads until nothing comes any more after `least` packets: what came.
fn read(port: &mut Port, least: usize) -> Vec<Vec<u8>> {
    let deadline = Deadline::new(format!("{least} packets come"));
    let mut seen = Vec::new();
    loop {
        match port.next().unwrap() {
            Next::Packet(packet) => seen.push(packet.bytes.to_vec()),
            _ if seen.len() >= least => return seen,
            _ => {
                deadline.check_seen(&seen.len());
                port.wait(Some(Duration::from_millis(100))).unwrap();
            }
        }
    }
}

fn flag(name: &str, object: &Path, rest: &str) -> String {
    format!("{name}={}{rest}", object.display())
}

/// A number of a map with values of 8 bytes.
fn number(client: &mut Client, program: &str, map: &str, entry: u32) -> u64 {
    let values = client.program_map(program, map, entry, 1).unwrap();
    u64::from_ne_bytes(values[0][..8].try_into().unwrap())
}

/// UDP in the witness frames (IPv4).
const UDP: u32 = 17;

#[test]
fn the_kernel_and_the_daemon_count_in_one_map() {
    both_count_in_one_map("count.c");
}

#[test]
fn so_do_they_by_a_program_in_rust() {
    both_count_in_one_map("count.rs");
}

fn both_count_in_one_map(example: &str) {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let object = example_bpf(example, lab.dir()).unwrap();
    let program = flag("count", &object, ",attach=xdp:wire1");
    let args = ["--source", "wire1", "--program", &program];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut port = daemon
        .port("wire1")
        .program("count")
        .ring_bytes(8 << 20)
        .open()
        .unwrap();
    let mut plain = daemon.port("wire1").ring_bytes(8 << 20).open().unwrap();
    let stream = Stream {
        pps: NonZeroU64::new(20_000),
        ..Stream::new("wire0", 5_000)
    };
    netns.enter(|| stream.send()).unwrap().unwrap();
    assert_eq!(read(&mut port, 5_000).len(), 5_000);
    assert_eq!(read(&mut plain, 5_000).len(), 5_000);

    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let all = client.programs().unwrap();
    assert_eq!((all.len(), all[0].ports, all[0].frames), (1, 1, 5_000));
    assert!(all[0].runs[0].starts_with("xdp:wire1"), "{:?}", all[0].runs);
    // Each frame once by either instance, in the same eight bytes.
    let count = number(&mut client, "count", "packets", UDP);
    assert_eq!(count, 10_000);
    // bpftool sees the same.
    let map = all[0]
        .maps
        .iter()
        .find(|map| map.name == "packets")
        .unwrap();
    let key = [&UDP.to_ne_bytes()[..]].concat();
    let mut words = vec!["map", "lookup", "id"];
    let id = map.id.to_string();
    let key: Vec<String> = key.iter().map(ToString::to_string).collect();
    words.extend([id.as_str(), "key"]);
    words.extend(key.iter().map(String::as_str));
    words.push("-j");
    let output = Command::new("bpftool").args(&words).output().unwrap();
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    let seen = &seen["formatted"]["value"];
    let raw = || String::from_utf8_lossy(&output.stdout).into_owned();
    match seen.as_u64() {
        Some(number) => assert_eq!(number, count),
        None => {
            let value: Value = serde_json::from_slice(&output.stdout).unwrap();
            let bytes = value["value"].as_array().map(|all| {
                let byte = |it: &Value| {
                    u8::from_str_radix(it.as_str().unwrap().trim_start_matches("0x"), 16)
                };
                all.iter().map(|it| byte(it).unwrap()).collect::<Vec<_>>()
            });
            let bytes = bytes.unwrap_or_else(|| panic!("bpftool says {}", raw()));
            assert_eq!(u64::from_ne_bytes(bytes.try_into().unwrap()), count);
        }
    }
    let (code, text) = daemon.vnplug(&[
        "programs", "count", "--map", "packets", "--first", "17", "--count", "1",
    ]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("10000"), "{text}");
    daemon.audit();
}

#[test]
fn a_sampler_drops_for_its_port_alone_and_every_frame_has_a_fate() {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let object = example_bpf("first.c", lab.dir()).unwrap();
    let program = flag("first", &object, "");
    let args = ["--source", "wire1", "--program", &program];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut port = daemon.port("wire1").program("first").open().unwrap();
    let mut plain = daemon.port("wire1").open().unwrap();
    let stream = Stream {
        flows: 4,
        pps: NonZeroU64::new(20_000),
        ..Stream::new("wire0", 1_000)
    };
    netns.enter(|| stream.send()).unwrap().unwrap();
    assert_eq!(read(&mut plain, 1_000).len(), 1_000);
    // Ten of each flow; two flows might share a place.
    let least = until(
        "the program has seen all",
        || daemon.audit(),
        |all| {
            let port = all
                .iter()
                .find(|it| it.kind == "port" && it.name == port.number().to_string());
            port.is_some_and(|it| value(it, "offered") == 1_000)
        },
    );
    let counted = least
        .iter()
        .find(|it| it.kind == "port" && it.name == port.number().to_string());
    let counted = counted.unwrap();
    let passed = value(counted, "delivered");
    assert!([40, 30, 20, 10].contains(&passed), "{passed}");
    assert_eq!(value(counted, "program"), 1_000 - passed);
    assert_eq!(read(&mut port, passed as usize).len() as u64, passed);
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    assert_eq!(number(&mut client, "first", ".bss", 0), 1_000 - passed);
    assert_eq!(client.programs().unwrap()[0].dropped, 1_000 - passed);
}

#[test]
fn a_rewriter_changes_what_its_reader_gets_and_nothing_else() {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let object = example_bpf("headers.c", lab.dir()).unwrap();
    let program = flag("headers", &object, "");
    let args = ["--source", "wire1", "--program", &program];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut port = daemon.port("wire1").program("headers").open().unwrap();
    let mut plain = daemon.port("wire1").open().unwrap();
    let stream = Stream {
        len_bytes: 400,
        ..Stream::new("wire0", 500)
    };
    netns.enter(|| stream.send()).unwrap().unwrap();
    let (cut, whole) = (read(&mut port, 500), read(&mut plain, 500));
    for (cut, whole) in cut.iter().zip(&whole) {
        assert_eq!((cut.len(), whole.len()), (42, 400));
        assert_eq!(cut[..24], whole[..24]);
        assert_eq!(
            (cut[29], cut[33]),
            (0, 0),
            "the last number of each address"
        );
        assert_eq!(
            (&cut[26..29], &cut[30..33]),
            (&whole[26..29], &whole[30..33])
        );
        assert_ne!((whole[29], whole[33]), (0, 0));
        assert_eq!(sum(&cut[14..34]), 0xffff, "the header's checksum is right");
        assert_eq!(sum(&whole[14..34]), 0xffff);
    }
}

/// The ones' complement sum of 16-bit words (RFC 1071); 0xffff if the checksum in it is right.
fn sum(bytes: &[u8]) -> u32 {
    let words = bytes
        .chunks(2)
        .map(|it| u32::from(u16::from_be_bytes([it[0], it[1]])));
    let sum: u32 = words.sum();
    (sum & 0xffff) + (sum >> 16)
}

#[test]
fn who_may_not_use_a_program_does_not_see_it() {
    let lab = Lab::new().unwrap();
    let object = example_bpf("count.c", lab.dir()).unwrap();
    let (mine, others) = (
        flag("mine", &object, ",open=uid:65534"),
        flag("others", &object, ""),
    );
    let args = [
        "--source",
        "lab=gen,size=60,pps=1000",
        "--program",
        &mine,
        "--program",
        &others,
    ];
    let allow = ["--allow", "uid:65534=lab"];
    let daemon = Daemon::start(&lab, None, &[&args[..], &allow].concat()).unwrap();
    let socket = daemon.socket();
    for path in [lab.dir(), socket.parent().unwrap()] {
        open_to_all(path, 0o755);
    }
    open_to_all(&socket, 0o666);
    let as_nobody = |words: &[&str]| {
        let vnplug = vnplug_e2e::daemon::program("vnplug").unwrap();
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(vnplug)
            .args(words)
            .env("VNPLUG_SOCKET", &socket)
            .output()
            .unwrap();
        let text = [&output.stdout[..], &output.stderr].concat();
        (
            output.status.code(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    };
    let (_, listed) = as_nobody(&["programs", "--json"]);
    assert!(
        listed.contains("mine") && !listed.contains("others"),
        "{listed}"
    );
    assert_eq!(
        as_nobody(&["programs", "mine", "--map", "packets", "--count", "1"]).0,
        Some(0)
    );
    let (code, text) = as_nobody(&["programs", "others", "--map", "packets"]);
    assert!(code != Some(0) && text.contains("no program"), "{text}");
    let (code, text) = as_nobody(&["count", "lab", "-c", "1", "--program", "others"]);
    assert!(code != Some(0) && text.contains("no program"), "{text}");
    assert_eq!(
        as_nobody(&["count", "lab", "-c", "1", "--program", "mine"]).0,
        Some(0)
    );
    // The operator sees both.
    let (_, listed) = daemon.vnplug(&["programs", "--json"]);
    assert!(
        listed.contains("mine") && listed.contains("others"),
        "{listed}"
    );
}

fn open_to_all(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn members_of_a_group_have_no_program_of_their_own() {
    let lab = Lab::new().unwrap();
    let object = example_bpf("count.c", lab.dir()).unwrap();
    let args = [
        "--source",
        "lab=gen,size=60,pps=1000",
        "--program",
        &flag("count", &object, ""),
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let refused = daemon
        .port("lab")
        .group("all")
        .program("count")
        .open()
        .unwrap_err();
    assert!(refused.to_string().contains("group"), "{refused}");
    let unknown = daemon.port("lab").program("other").open().unwrap_err();
    assert!(unknown.to_string().contains("vnplug programs"), "{unknown}");
    drop(daemon.port("lab").program("count").open().unwrap());
}

/// What the daemon says of a program that it does not start with.
fn complaint(lab: &Lab, spec: &str) -> String {
    match Daemon::start(
        lab,
        None,
        &["--source", "lab=gen,size=60,count=1", "--program", spec],
    ) {
        Ok(_) => panic!("a daemon started with {spec}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn programs_that_cannot_be_are_refused_with_reason() {
    let lab = Lab::new().unwrap();
    let source = |name: &str, body: &str| {
        let text = format!(
            "#include <linux/bpf.h>\n#include <bpf/bpf_helpers.h>\n{body}\nchar _license[] SEC(\"license\") = \"GPL\";\n"
        );
        let path = lab.dir().join(format!("{name}.c"));
        std::fs::write(&path, text).unwrap();
        build_bpf(&path, lab.dir()).unwrap()
    };
    let wild = source(
        "wild",
        "SEC(\"xdp\") int wild(struct xdp_md *ctx) { *(volatile int *)0x1234 = 1; return XDP_PASS; }",
    );
    let endless = source(
        "endless",
        "SEC(\"xdp\") int endless(struct xdp_md *ctx) { for (;;) bpf_get_prandom_u32(); return XDP_PASS; }",
    );
    let forbidden = source(
        "forbidden",
        "SEC(\"xdp\") int forbidden(struct xdp_md *ctx) { bpf_printk(\"x\"); return XDP_PASS; }",
    );
    let hash = source(
        "hash",
        "struct { __uint(type, BPF_MAP_TYPE_PERCPU_HASH); __uint(max_entries, 8); __type(key, int); __type(value, int); } \
         m SEC(\".maps\"); SEC(\"xdp\") int hash(struct xdp_md *ctx) { int k = 0; return bpf_map_lookup_elem(&m, &k) ? 1 : 2; }",
    );
    let two = source(
        "two",
        "SEC(\"xdp\") int one(struct xdp_md *ctx) { return XDP_PASS; } SEC(\"xdp\") int other(struct xdp_md *ctx) { return XDP_DROP; }",
    );
    let probe = source(
        "probe",
        "SEC(\"kprobe/x\") int probe(void *ctx) { return 0; }",
    );
    for (object, what) in [
        (&wild, "the kernel does not accept it"),
        (&endless, "the kernel does not accept it"),
        (&forbidden, "helper 6"),
        (&hash, "BPF_MAP_TYPE_ARRAY"),
        (&two, "one, other"),
        (&probe, "SEC(\"xdp\")"),
    ] {
        let said = complaint(&lab, &flag("it", object, ""));
        assert!(said.contains(what), "{what:?} is not in {said:?}");
    }
    assert!(complaint(&lab, "it=/nowhere.o").contains("/nowhere.o"));
    let text = lab.dir().join("text.o");
    std::fs::write(&text, "not an object").unwrap();
    assert!(complaint(&lab, &flag("it", &text, "")).contains("not an eBPF object"));
    // Control: the one of two that is named runs.
    let named = flag("it", &two, ":one");
    let args = ["--source", "lab=gen,size=60,pps=1000", "--program", &named];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut port = daemon.port("lab").program("it").open().unwrap();
    assert!(!read(&mut port, 5).is_empty());
}

#[test]
fn a_guest_uses_what_is_open_to_it_and_sees_the_same_memory() {
    let lab = Lab::new().unwrap();
    let object = example_bpf("count.c", lab.dir()).unwrap();
    let (mine, others) = (
        flag("mine", &object, ",open=vm:uml"),
        flag("others", &object, ""),
    );
    let args = [
        "--source",
        "lab=gen,size=60,pps=1000",
        "--program",
        &mine,
        "--program",
        &others,
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image().unwrap());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    let run = |command: &str| uml.guest.run(command, PATIENCE).unwrap();
    let listed = run("vnplug programs --json").text();
    assert!(
        listed.contains("mine") && !listed.contains("others"),
        "{listed}"
    );
    assert_eq!(
        run("vnplug count host:lab -c 500 --program mine >/dev/null").status,
        0
    );
    let refused = run("vnplug count host:lab -c 1 --program others 2>&1");
    assert!(
        refused.status != 0 && refused.text().contains("no program"),
        "{}",
        refused.text()
    );
    // Nobody else uses it now, so both looks are at the same moment.
    let inside = run("vnplug programs mine --map packets --first 17 --count 1 --json").text();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let count = number(&mut client, "mine", "packets", UDP);
    assert!(count >= 500, "{count}");
    let inside: Value = serde_json::from_str(&inside).unwrap();
    assert_eq!(inside[0]["number"], count);
}

#[test]
fn a_port_has_its_program_again_when_the_daemon_has_started_again() {
    let lab = Lab::new().unwrap();
    let object = example_bpf("count.c", lab.dir()).unwrap();
    let args = [
        "--source",
        "lab=gen,size=60,pps=1000",
        "--program",
        &flag("count", &object, ""),
    ];
    let mut daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut port = daemon.port("lab").program("count").open().unwrap();
    assert!(read(&mut port, 10).len() >= 10);
    daemon.kill();
    daemon.launch().unwrap();
    assert!(read(&mut port, 10).len() >= 10);
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let all = client.programs().unwrap();
    assert!(all[0].ports == 1 && all[0].frames > 0, "{all:?}");
}

/// What lies in all maps of a program.
fn memory(program: &Program, reader: &vnplug_twin::Instance) -> Vec<Vec<u8>> {
    let maps = program.maps().iter().enumerate();
    maps.map(|(at, (_, array))| {
        let mut bytes = vec![0; array.bytes() as usize];
        assert!(reader.read_map(at, 0, &mut bytes));
        bytes
    })
    .collect()
}

#[test]
fn the_examples_do_the_same_in_the_kernel_and_in_the_daemon() {
    let lab = Lab::new().unwrap();
    let mut dice = Dice(seed("examples"));
    let mut roll = move || dice.roll();
    for name in ["count.c", "count.rs", "first.c", "headers.c"] {
        let object = std::fs::read(example_bpf(name, lab.dir()).unwrap()).unwrap();
        let object = Object::parse(&object, None).unwrap();
        // Each has maps of its own, which must be equal in the end.
        let (one, other) = (
            Program::load("one", &object).unwrap(),
            Program::load("other", &object).unwrap(),
        );
        let mut daemon = one.instance().unwrap();
        let reader = other.instance().unwrap();
        let mut out = Vec::with_capacity(4096);
        for _ in 0..20_000 {
            let len = 14 + (roll() % 200) as usize;
            let mut frame: Vec<u8> = (0..len).map(|_| roll() as u8).collect();
            // Most are IPv4, of a few flows, and often with a header of the usual length.
            if len > 34 && roll() % 8 != 0 {
                frame[12..14].copy_from_slice(&[8, 0]);
                if roll() % 4 != 0 {
                    frame[14] = 0x45;
                }
                frame[23] = [6, 17, 1][(roll() % 3) as usize];
                frame[26..34].fill((roll() % 4) as u8);
            }
            let theirs = other.kernel().test_output(&frame, &mut out).unwrap();
            let run = daemon.run(&frame, &Meta::default());
            assert_eq!(run.verdict, Some(theirs.cast_signed()), "{name}: {frame:?}");
            assert_eq!(run.frame, out, "{name}: {frame:?}");
        }
        assert!(memory(&one, &daemon) == memory(&other, &reader), "{name}");
    }
}

#[test]
fn a_program_of_traffic_control_runs_there_and_at_a_port() {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let path = lab.dir().join("odd.c");
    // Keeps what has an odd last byte, by the helper that reads a frame wherever it lies.
    let text = "#include <linux/bpf.h>\n#include <bpf/bpf_helpers.h>\n__u64 seen;\n\
        SEC(\"tc\") int odd(struct __sk_buff *skb) {\n  __u8 last = 0;\n  __sync_fetch_and_add(&seen, 1);\n\
          if (bpf_skb_load_bytes(skb, skb->len - 1, &last, 1)) return 2;\n  return last & 1 ? 0 : 2;\n}\n\
        char _license[] SEC(\"license\") = \"GPL\";\n";
    std::fs::write(&path, text).unwrap();
    let object = build_bpf(&path, lab.dir()).unwrap();
    let args = [
        "--source",
        "wire1",
        "--program",
        &flag("odd", &object, ",attach=tc:wire1"),
    ];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut port = daemon.port("wire1").program("odd").open().unwrap();
    let mut plain = daemon.port("wire1").open().unwrap();
    netns
        .enter(|| Stream::new("wire0", 500).send())
        .unwrap()
        .unwrap();
    let all = read(&mut plain, 500);
    let odd = all
        .iter()
        .filter(|frame| frame[frame.len() - 1] & 1 == 1)
        .count();
    assert_eq!(read(&mut port, odd).len(), odd);
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let runs = client.programs().unwrap()[0].runs.clone();
    assert_eq!(runs, ["tc:wire1"]);
    until(
        "both have seen each frame",
        || number(&mut client, "odd", ".bss", 0),
        |seen| *seen == 1_000,
    );
    // By its older name, and by one that is for other frames.
    drop((port, plain, daemon));
    for (name, is_known) in [
        ("classifier", true),
        ("tcx/ingress", true),
        ("tc/egress", false),
    ] {
        std::fs::write(
            &path,
            text.replace("SEC(\"tc\")", &format!("SEC(\"{name}\")")),
        )
        .unwrap();
        let object = build_bpf(&path, lab.dir()).unwrap();
        let parsed = Object::parse(&std::fs::read(&object).unwrap(), None);
        match parsed {
            Ok(_) => assert!(is_known, "{name}"),
            Err(error) => assert!(
                !is_known && error.to_string().contains("SEC(\"tc\")"),
                "{error}"
            ),
        }
    }
    let wrong = complaint(&lab, &flag("odd", &object, ",attach=xdp:lo"));
    assert!(wrong.contains("SEC(\"xdp\")"), "{wrong}");
}
