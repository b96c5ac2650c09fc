//! Operators' programs that change while the daemon runs: every frame is judged by one version, maps of the same shape stay, and
//! what is refused changes nothing.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vnplug::{Client, Error, Next, Port, ProgramChange, ProgramInfo, SourceRequest};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::reading::{end_of, reads_on};
use vnplug_e2e::third_party::build_bpf;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::user::{as_user, open_to_all};
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::{Deadline, eventually, until};

/// Counts in one map what each version has judged, and leaves its mark on the first byte of the frame.
const MARKS: &str = "#include <linux/bpf.h>\n#include <bpf/bpf_helpers.h>\n\
    struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, ENTRIES); __type(key, __u32); __type(value, __u64); } \
    judged SEC(\".maps\");\n\
    __u64 own;\n\
    SEC(\"xdp\") int marks(struct xdp_md *ctx) {\n\
      __u8 *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;\n\
      __u32 at = VERSION; __u64 *n = bpf_map_lookup_elem(&judged, &at);\n\
      if (n) __sync_fetch_and_add(n, 1);\n\
      __sync_fetch_and_add(&own, 1);\n\
      if (data + 1 <= end) *data ^= MARK;\n\
      return XDP_PASS;\n\
    }\n\
    char _license[] SEC(\"license\") = \"GPL\";\n";

/// A version of it.
fn version(lab: &Lab, name: &str, number: u32, (mark, entries): (u32, u32)) -> PathBuf {
    let text = MARKS
        .replace("VERSION", &number.to_string())
        .replace("MARK", &mark.to_string())
        .replace("ENTRIES", &entries.to_string());
    let path = lab.dir().join(format!("{name}.c"));
    fs::write(&path, text).unwrap();
    build_bpf(&path, lab.dir()).unwrap()
}

fn spec(name: &str, object: &std::path::Path, rest: &str) -> String {
    format!("{name}={}{rest}", object.display())
}

fn client(daemon: &Daemon) -> Client {
    Client::connect_to(&daemon.socket()).unwrap()
}

fn number(client: &mut Client, map: &str, entry: u32) -> u64 {
    let values = client.program_map("marks", map, entry, 1).unwrap();
    u64::from_ne_bytes(values[0][..8].try_into().unwrap())
}

fn only(client: &mut Client) -> ProgramInfo {
    let mut all = client.programs().unwrap();
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn replace(client: &mut Client, text: String) -> Result<(), Error> {
    client.change_programs(ProgramChange::Replace { text })
}

/// How many frames have which first byte.
fn read_marks(port: &mut Port, all: u64) -> [u64; 256] {
    let deadline = Deadline::new(format!("{all} frames come"));
    let mut marks = [0; 256];
    let mut seen = 0;
    while seen < all {
        match port.next().unwrap() {
            Next::Packet(packet) => {
                marks[usize::from(packet.bytes[0])] += 1;
                seen += 1;
            }
            Next::Ended => panic!("the source ended after {seen} frames"),
            Next::Nothing => {
                deadline.check_seen(&seen);
                port.wait(Some(Duration::from_millis(100))).unwrap();
            }
        }
    }
    marks
}

/// How many frames have which first byte, until the port is gone.
fn read_marks_to_the_end(port: &mut Port) -> [u64; 256] {
    let deadline = Deadline::new("the port is gone");
    let (mut marks, mut is_gone) = ([0; 256], false);
    loop {
        deadline.check();
        match port.next() {
            Ok(Next::Packet(packet)) => marks[usize::from(packet.bytes[0])] += 1,
            Ok(Next::Ended) => panic!("the source ended"),
            // What came between the look and the end is still there.
            Ok(Next::Nothing) if !is_gone => {
                is_gone = port.wait(Some(Duration::from_millis(100))).is_err();
            }
            Ok(Next::Nothing) | Err(_) => return marks,
        }
    }
}

/// Each frame has one mark, of the version that counted it. One that both had judged would have another one, and one that neither
/// had judged none.
fn judged_once(lab: &Lab, looking: &mut Client, marks: &[u64; 256]) {
    let judged = [0, 1].map(|it| number(looking, "judged", it));
    let plain = first_byte(lab);
    assert_eq!([1, 2].map(|mark| marks[usize::from(plain ^ mark)]), judged);
    let all = judged.iter().sum::<u64>();
    assert_eq!(marks.iter().sum::<u64>(), all);
    let info = only(looking);
    assert_eq!((info.frames, info.dropped, info.aborted), (all, 0, 0));
}

#[test]
fn replaced_a_hundred_times_every_frame_is_judged_by_one_version() {
    let lab = Lab::new().unwrap();
    let versions = [0, 1].map(|it| version(&lab, &format!("v{it}"), it, (it + 1, 2)));
    let program = spec("marks", &versions[0], "");
    let args = [
        "--source",
        "lab=gen,size=60,pps=20000,start=attach",
        "--program",
        &program,
        "--change-programs",
        "on",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let options = daemon.port("lab").program("marks").ring_bytes(64 << 20);
    let mut port = options.open().unwrap();
    let mut changing = client(&daemon);
    let changes = std::thread::spawn(move || {
        for time in 1..=100 {
            let text = spec("marks", &versions[time % 2], "");
            replace(&mut changing, text).unwrap();
        }
        let judged = [0, 1].map(|it| number(&mut changing, "judged", it));
        let name = "lab".to_owned();
        changing
            .change_sources(SourceRequest::Remove { name })
            .unwrap();
        judged
    });
    let marks = read_marks_to_the_end(&mut port);
    let judged = changes.join().unwrap();
    println!("while it was replaced 100 times: {judged:?} frames");
    assert!(judged.iter().all(|it| *it > 100), "{judged:?}");
    assert_eq!(port.counts().lost, 0);
    judged_once(&lab, &mut client(&daemon), &marks);
    daemon.audit();
}

#[test]
fn of_a_source_every_frame_is_judged_by_one_version() {
    const FRAMES: u64 = 60_000;
    let lab = Lab::new().unwrap();
    let versions = [0, 1].map(|it| version(&lab, &format!("v{it}"), it, (it + 1, 2)));
    let program = spec("marks", &versions[0], "");
    let source =
        format!("lab=gen,size=60,pps=20000,count={FRAMES},start=attach,queues=1,program=marks");
    let args = [
        "--source",
        &source,
        "--program",
        &program,
        "--change-programs",
        "on",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut port = daemon.port("lab").ring_bytes(16 << 20).open().unwrap();
    let mut changing = client(&daemon);
    let is_over = AtomicBool::new(false);
    let (marks, times) = std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            let mut times = 0;
            while !is_over.load(Ordering::Relaxed) {
                times += 1;
                replace(&mut changing, spec("marks", &versions[times % 2], "")).unwrap();
            }
            times
        });
        let marks = read_marks(&mut port, FRAMES);
        is_over.store(true, Ordering::Relaxed);
        (marks, changes.join().unwrap())
    });
    println!("replaced {times} times");
    assert!(times >= 5, "{times}");
    assert_eq!(port.counts().lost, 0);
    judged_once(&lab, &mut client(&daemon), &marks);
    daemon.audit();
}

/// Sums 64 bytes again and again for each frame.
const SUMS: &str = "#include <linux/bpf.h>\n#include <bpf/bpf_helpers.h>\n\
    SEC(\"xdp\") int sums(struct xdp_md *ctx) {\n\
      __be32 words[16] = {};\n\
      __u32 sum = ctx->rx_queue_index;\n\
      for (int i = 0; i < TIMES; i++) sum = bpf_csum_diff(words, 64, words, 64, sum);\n\
      return sum == 0x12345678 ? XDP_DROP : XDP_PASS;\n\
    }\n\
    char _license[] SEC(\"license\") = \"GPL\";\n";

#[test]
fn a_program_that_takes_too_long_has_its_own_ports_frames_alone() {
    let lab = Lab::new().unwrap();
    let [long, short] = ["1000", "100"].map(|times| {
        let path = lab.dir().join(format!("sums{times}.c"));
        fs::write(&path, SUMS.replace("TIMES", times)).unwrap();
        build_bpf(&path, lab.dir()).unwrap()
    });
    let programs = [("sums", &long), ("few", &short)].map(|(name, object)| spec(name, object, ""));
    let args = [
        "--source",
        "lab=gen,size=60,pps=1000,start=attach",
        "--program",
        &programs[0],
        "--program",
        &programs[1],
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut port = daemon.port("lab").program("sums").open().unwrap();
    let mut few = daemon.port("lab").program("few").open().unwrap();
    let mut plain = daemon.port("lab").open().unwrap();
    let mut looking = client(&daemon);
    // The kernel's verifier let it pass; it is stopped for each frame, and that one is dropped.
    until(
        "it was stopped",
        || looking.programs().unwrap(),
        |all| all[0].name == "sums" && all[0].aborted > 300 && all[0].frames >= all[0].aborted,
    );
    assert!(matches!(port.next().unwrap(), Next::Nothing));
    // Others have all; the control is one that takes less.
    read_marks(&mut plain, 300);
    read_marks(&mut few, 300);
    assert_eq!((plain.counts().lost, few.counts().lost), (0, 0));
    let all = looking.programs().unwrap();
    assert_eq!(all[1].aborted, 0, "{all:?}");
    daemon.audit();
}

#[test]
fn who_may_not_use_a_program_any_more_has_no_port_that_goes_through_it() {
    let lab = Lab::new().unwrap();
    let versions = [0, 1].map(|it| version(&lab, &format!("v{it}"), it, (it + 1, 2)));
    let config = open_to_all(
        &lab,
        "change_programs = \"on\"\n[[source]]\nname = \"lab\"\nkind = \"gen\"\npps = 20000\n\
         [[allow]]\nuid = 54321\nsource = \"lab\"\n",
    );
    let daemon = Daemon::start(&lab, None, &["--config", &config]).unwrap();
    let mut changing = client(&daemon);
    let text = spec("marks", &versions[0], ",open=uid:54321");
    changing
        .change_programs(ProgramChange::Add { text })
        .unwrap();
    let options = daemon.port("lab").program("marks");
    let of_user = options.clone();
    let mut port = as_user(move || of_user.open()).unwrap();
    let mut own = options.clone().open().unwrap();
    // The control: another version for the same user ends nothing.
    replace(
        &mut changing,
        spec("marks", &versions[1], ",open=uid:54321"),
    )
    .unwrap();
    until(
        "the new one judges",
        || number(&mut changing, "judged", 1),
        |judged| *judged > 10,
    );
    assert_eq!(only(&mut changing).ports, 2);
    replace(&mut changing, spec("marks", &versions[0], "")).unwrap();
    // When it is answered nothing of the user's goes through it any more.
    assert_eq!(only(&mut changing).ports, 1);
    // It asks for the port again, and is refused.
    let told = as_user(move || end_of(&mut port)).to_string();
    assert!(
        told.contains("took the right") && told.contains("no program"),
        "{told}"
    );
    let refused = as_user(move || options.open()).unwrap_err();
    assert!(refused.to_string().contains("no program"), "{refused}");
    // The operator's goes on.
    reads_on(&mut own);
}

/// Of a frame that no program has judged: the control of the marks.
fn first_byte(lab: &Lab) -> u8 {
    let args = ["--source", "lab=gen,size=60,pps=1000,count=10,start=attach"];
    let daemon = Daemon::start(lab, None, &args).unwrap();
    let mut port = daemon.port("lab").open().unwrap();
    let marks = read_marks(&mut port, 10);
    marks.iter().position(|count| *count == 10).unwrap() as u8
}

#[test]
fn the_kernel_has_the_new_version_from_one_frame_to_the_next_on_the_old_map() {
    const FRAMES: u64 = 20_000;
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    netns.veth("more0", "more1").unwrap();
    let versions = [0, 1].map(|it| version(&lab, &format!("v{it}"), it, (0, 2)));
    let hooked = |it: usize, at: &str| spec("marks", &versions[it], at);
    let program = hooked(0, ",attach=xdp:wire1");
    let args = [
        "--source",
        "wire1",
        "--program",
        &program,
        "--change-programs",
        "on",
    ];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut port = daemon
        .port("wire1")
        .program("marks")
        .ring_bytes(16 << 20)
        .open()
        .unwrap();
    let mut changing = client(&daemon);
    let ids = |info: &ProgramInfo| {
        let map = info.maps.iter().find(|it| it.name == "judged").unwrap();
        (info.id, map.id)
    };
    let before = ids(&only(&mut changing));
    let stream = Stream {
        pps: NonZeroU64::new(10_000),
        ..Stream::new("wire0", FRAMES)
    };
    let mut times = 0;
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| netns.enter(|| stream.send()).unwrap().unwrap());
        while !sending.is_finished() {
            times += 1;
            replace(&mut changing, hooked(times % 2, ",attach=xdp:wire1")).unwrap();
        }
    });
    read_marks(&mut port, FRAMES);
    let mut judged = || [0, 1].map(|it| number(&mut changing, "judged", it));
    // Once by the kernel and once at the port.
    let each = judged();
    println!("replaced {times} times: {each:?}");
    assert_eq!(each.iter().sum::<u64>(), 2 * FRAMES);
    assert!(
        times >= 10 && each[0] > 0 && each[1] > 0,
        "{times}: {each:?}"
    );
    let after = ids(&only(&mut changing));
    assert!(
        after.0 != before.0 && after.1 == before.1,
        "{before:?} {after:?}"
    );
    // Elsewhere, and nowhere.
    for (at, runs) in [(",attach=xdp:more1", &["more1"][..]), ("", &[])] {
        replace(&mut changing, hooked(0, at)).unwrap();
        let told = only(&mut changing).runs;
        assert_eq!(told.len(), runs.len(), "{told:?}");
        for (name, peer) in [("wire1", "wire0"), ("more1", "more0")] {
            let is_there = runs.contains(&name);
            until(
                "the kernel runs it where it is told",
                || netns.exec(&["ip", "-d", "link", "show", name]).unwrap(),
                |listed| listed.contains("xdp") == is_there,
            );
            assert!(netns.exec(&["ip", "link", "show", peer]).is_ok());
        }
    }
}

#[test]
fn what_is_refused_changes_nothing_and_maps_of_another_shape_are_new() {
    let lab = Lab::new().unwrap();
    let [good, other, wide] = [(0, 2), (1, 2), (1, 3)];
    let good = version(&lab, "good", good.0, (1, good.1));
    let other = version(&lab, "other", other.0, (2, other.1));
    let wide = version(&lab, "wide", wide.0, (2, wide.1));
    let wild = lab.dir().join("wild.c");
    let text = "#include <linux/bpf.h>\n#include <bpf/bpf_helpers.h>\nSEC(\"xdp\") int wild(struct xdp_md *ctx) { \
                *(volatile int *)0x1234 = 1; return XDP_PASS; }\nchar _license[] SEC(\"license\") = \"GPL\";\n";
    fs::write(&wild, text).unwrap();
    let wild = build_bpf(&wild, lab.dir()).unwrap();
    let args = [
        "--source",
        "lab=gen,size=60,pps=1000",
        "--change-programs",
        "on",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let run = |words: &[&str]| daemon.vnplug(&[&["programs"], words].concat());
    let done = |words: &[&str]| assert_eq!(run(words), (Some(0), String::new()), "{words:?}");
    done(&["add", &spec("marks", &good, ",open=*")]);
    let mut port = daemon.port("lab").program("marks").open().unwrap();
    let mut looking = client(&daemon);
    until(
        "it has judged",
        || number(&mut looking, "judged", 0),
        |n| *n > 50,
    );
    let before = only(&mut looking);
    let wild = spec("marks", &wild, "");
    let again = spec("marks", &other, "");
    for (words, why) in [
        (["replace", &*wild], "the kernel does not accept it"),
        (["replace", "marks=/nowhere.o"], "/nowhere.o"),
        (["replace", "nothing"], "no program \"nothing\""),
        (["add", &*again], "already"),
        (["add", "odd=/etc/hostname"], "not an eBPF object"),
        (["rm", "nothing"], "no program"),
        (
            ["replace", &*format!("{again},attach=xdp:no-such-if0")],
            "no-such-if0",
        ),
        (
            ["replace", &*format!("{again},attach=tc:lo")],
            "SEC(\"tc\")",
        ),
    ] {
        let (code, said) = run(&words);
        assert!(code != Some(0) && said.contains(why), "{words:?}: {said}");
        let now = only(&mut looking);
        assert_eq!((now.id, &now.maps), (before.id, &before.maps), "{words:?}");
    }
    // The same file read again is another version with the same maps; variables begin anew.
    let total = number(&mut looking, "judged", 0);
    done(&["replace", "marks"]);
    let now = only(&mut looking);
    let map =
        |info: &ProgramInfo, name: &str| info.maps.iter().find(|it| it.name == name).unwrap().id;
    assert_ne!(now.id, before.id);
    assert_eq!(map(&now, "judged"), map(&before, "judged"));
    assert_ne!(map(&now, ".bss"), map(&before, ".bss"));
    assert!(number(&mut looking, "judged", 0) >= total);
    assert!(number(&mut looking, ".bss", 0) < total);
    // Of another shape all begins anew.
    done(&["replace", &spec("marks", &wide, ",open=*")]);
    let wide = only(&mut looking);
    assert_ne!(map(&wide, "judged"), map(&now, "judged"));
    assert_eq!(number(&mut looking, "judged", 0), 0);
    until(
        "the new one judges",
        || number(&mut looking, "judged", 1),
        |n| *n > 10,
    );
    // One that is taken away takes the ports with it, and a source keeps its own.
    let mut plain = daemon.port("lab").open().unwrap();
    done(&["rm", "marks"]);
    let told = end_of(&mut port);
    assert!(told.to_string().contains("removed the program"), "{told}");
    assert!(looking.programs().unwrap().is_empty());
    done(&["add", &spec("marks", &good, "")]);
    let (code, said) = daemon.vnplug(&["source", "add", "own=gen,pps=10,program=marks"]);
    assert_eq!((code, &*said), (Some(0), ""));
    let (code, said) = run(&["rm", "marks"]);
    assert!(code != Some(0) && said.contains("source \"own\""), "{said}");
    done(&["replace", &spec("marks", &other, "")]);
    assert_eq!(
        daemon.vnplug(&["source", "rm", "own"]),
        (Some(0), String::new())
    );
    done(&["rm", "marks"]);
    assert!(matches!(
        plain.next().unwrap(),
        Next::Packet(_) | Next::Nothing
    ));
    eventually("nothing of it is left in the kernel", || {
        !fs::read_to_string(format!("/proc/{}/maps", daemon.pid()))
            .unwrap()
            .contains("bpf-map")
    });
}

#[test]
fn who_may_not_is_refused() {
    let lab = Lab::new().unwrap();
    let good = version(&lab, "good", 0, (1, 2));
    let add = ProgramChange::Add {
        text: spec("marks", &good, ""),
    };
    // It was not told that it may.
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let refused = client(&daemon)
        .change_programs(add.clone())
        .unwrap_err()
        .to_string();
    assert!(refused.contains("--change-programs on"), "{refused}");
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    drop(daemon);
    let config = open_to_all(
        &lab,
        "change_programs = \"on\"\n[[source]]\nname = \"lab\"\nkind = \"gen\"\npps = 10\n",
    );
    let daemon = Daemon::start(&lab, None, &["--config", &config]).unwrap();
    let socket = daemon.socket();
    let of_user = add.clone();
    let refused = as_user(move || {
        Client::connect_to(&socket)
            .unwrap()
            .change_programs(of_user)
    });
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("only root"), "{refused}");
    // One thread alone can do more than those of the other daemon.
    let rights = |status: &str| {
        let line = status.lines().find(|it| it.starts_with("CapEff:")).unwrap();
        line.to_owned()
    };
    let more = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
        let tasks = tasks.map(|task| task.unwrap().path());
        // One that ends meanwhile has neither.
        let names = tasks.filter_map(|dir| {
            let name = fs::read_to_string(dir.join("comm")).ok()?;
            let own = rights(&fs::read_to_string(dir.join("status")).ok()?) != rights(&status);
            own.then(|| name.trim().to_owned())
        });
        names.collect::<Vec<_>>()
    };
    // A thread has its name a moment after it began.
    let found = until("the thread has its name", more, |names| {
        !names.contains(&"vnplugd".to_owned())
    });
    assert_eq!(found, ["vnplug-programs"]);
    client(&daemon).change_programs(add).unwrap();
}

#[test]
fn a_reload_does_what_differs_of_programs() {
    let lab = Lab::new().unwrap();
    let versions = [0, 1].map(|it| version(&lab, &format!("v{it}"), it, (it + 1, 2)));
    let table = |it: usize| {
        format!(
            "[[program]]\nname = \"marks\"\nfile = \"{}\"\n",
            versions[it].display()
        )
    };
    let source = |name: &str, rest: &str| {
        format!("[[source]]\nname = \"{name}\"\nkind = \"gen\"\npps = 1000\n{rest}")
    };
    let head = "socket_mode = 0o666\n";
    for may in [true, false] {
        let head = match may {
            true => format!("{head}change_programs = \"on\"\n"),
            false => head.to_owned(),
        };
        let kept = source("lab", "");
        let file = open_to_all(
            &lab,
            &format!("{}{kept}", &head[head.find('\n').unwrap() + 1..]),
        );
        let daemon = Daemon::start(&lab, None, &["--config", &file]).unwrap();
        let reload = |parts: &[&str]| {
            fs::write(&file, format!("{head}{}", parts.concat())).unwrap();
            daemon.vnplug(&["reload"])
        };
        let says = |what: &str| (Some(0), what.to_owned());
        if !may {
            let waits = "program marks: waits for a restart of the daemon\n";
            assert_eq!(reload(&[&kept, &table(0)]), says(waits));
            assert_eq!(reload(&[&kept, &table(0)]), says(waits));
            continue;
        }
        // One that is new, and a source that has it.
        let own = source("own", "program = \"marks\"\n");
        let said = reload(&[&kept, &own, &table(0)]);
        assert_eq!(said, says("source own: added\nprogram marks: added\n"));
        let mut port = daemon.port("lab").program("marks").open().unwrap();
        let mut looking = client(&daemon);
        until("both judge", || only(&mut looking).frames, |n| *n > 100);
        assert_eq!(only(&mut looking).ports, 1);
        let said = reload(&[&kept, &own, &table(1)]);
        assert_eq!(said, says("program marks: changed\n"));
        let before = number(&mut looking, "judged", 0);
        until(
            "the other judges",
            || number(&mut looking, "judged", 1),
            |n| *n > 100,
        );
        assert_eq!(number(&mut looking, "judged", 0), before);
        // All or nothing.
        let bad = source("bad", "program = \"others\"\n");
        let (code, said) = reload(&[&kept, &own, &bad, &table(0)]);
        assert!(
            code != Some(0) && said.contains("others") && said.contains("nothing is changed"),
            "{said}"
        );
        assert_eq!(number(&mut looking, "judged", 0), before);
        let (code, said) = reload(&[&kept, &own]);
        assert!(code != Some(0) && said.contains("source \"own\""), "{said}");
        let said = reload(&[&kept]);
        assert_eq!(said, says("source own: removed\nprogram marks: removed\n"));
        let told = end_of(&mut port);
        assert!(told.to_string().contains("removed the program"), "{told}");
    }
}
