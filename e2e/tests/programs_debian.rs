//! Debian's programs that capture with libpcap, each its own way, against themselves on the real
//! wire. What each calls is in its row.

use vnplug_e2e::programs::{Place, Seen, Stage, same};

/// One program.
struct Program {
    command: &'static str,
    /// What it prints when it listens; empty if nothing.
    ready: &'static str,
    /// What it prints of the last packet it cares for, which ends the comparison.
    last: &'static str,
    /// Lines that differ in themselves, between any two runs.
    own: &'static [&'static str],
}

/// `pcap_open_live`, `pcap_lookupnet`, `pcap_compile` with its netmask, `pcap_loop`.
const NGREP: Program = Program {
    command: "ngrep -d {dev} -l -q -t -W byline .",
    ready: "match",
    last: "the last words",
    // Ours has no address to look up.
    own: &["interface: "],
};
/// `pcap_fileno` in `poll`, `pcap_dispatch`; becomes another user after a chroot.
const P0F: Program = Program {
    command: "stdbuf -oL p0f -i {dev} -u daemon 'tcp port 80 or port 9'",
    ready: "Entered main event loop",
    last: "fd78:0:0:0:0:0:0:1/80 (http response)",
    own: &["uptime", "up_mod", "raw_freq", "[+]", "[!]"],
};
/// `pcap_open_live`, `pcap_loop`, `pcap_breakloop` from its signal handler.
const TCPFLOW: Program = Program {
    command: "stdbuf -oL tcpflow -i {dev} -c -D -X /dev/null 'tcp port 80'",
    ready: "listening on",
    last: "A page of the far end: /fd78::1",
    own: &[],
};
/// `pcap_open_live`, `pcap_loop` with TCP put together.
const SSLDUMP: Program = Program {
    command: "stdbuf -oL ssldump -i {dev} -n -H port 443",
    ready: "",
    last: "TCP FIN",
    own: &[],
};
/// `pcap_open_live` without immediate mode, `pcap_loop`, a filter on bytes.
const DHCPDUMP: Program = Program {
    command: "stdbuf -oL dhcpdump -i {dev}",
    ready: "",
    last: "DHCPACK",
    own: &["  TIME: "], // when it prints
};
/// `pcap_next`, `pcap_stats`, from Python.
const PCAPY: Program = Program {
    command: "/usr/bin/python3 -u -c '
import pcapy
wire = pcapy.open_live(\"{dev}\", 65535, 1, 100)
wire.setfilter(\"udp port 53\")
print(\"listening\", wire.datalink())
for number in range(6):
    head, data = wire.next()
    while head is None:
        head, data = wire.next()
    print(head.getts(), head.getcaplen(), head.getlen(), data.hex())
print(wire.stats())
print(\"done\")
while True: wire.next()'",
    ready: "listening",
    last: "done",
    own: &[],
};

#[test]
fn six_programs_see_the_same_as_on_the_wire() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    let uml = stage.uml().unwrap();
    let places = [&Place::Host, &uml];
    let programs = [NGREP, P0F, TCPFLOW, SSLDUMP, DHCPDUMP, PCAPY];
    let mut watches: Vec<_> = programs
        .iter()
        .map(|program| {
            stage
                .watch(&places, program.command, program.ready)
                .unwrap()
        })
        .collect();
    stage.talk.say("the last words").unwrap();
    for (watch, program) in watches.iter_mut().zip(&programs) {
        watch.until(program.last).unwrap();
        watch.signal("TERM").unwrap();
        let all = watch.wait_all().unwrap();
        same(&all, |text| {
            let end = text.find(program.last).unwrap() + program.last.len();
            let own = |line: &&str| !program.own.iter().any(|own| line.contains(own));
            text[..end].lines().filter(own).collect()
        });
    }
}

/// `pcap_create` and its options, `pcap_loop` in a thread that `pthread_cancel` ends, `pcap_dump`.
#[test]
fn sngrep_saves_the_same_call() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    let uml = stage.uml().unwrap();
    let command = "sngrep -d {dev} -N -q -O {dir}/call.pcap udp port 5060";
    let mut watch = stage.watch(&[&Place::Host, &uml], command, "").unwrap();
    watch.talk("call").unwrap();
    let bye = b"CSeq: 3 BYE";
    let whole = |bytes: &[u8]| bytes.windows(bye.len()).filter(|part| part == bye).count() == 2;
    watch.until_file("call.pcap", whole).unwrap();
    watch.signal("INT").unwrap();
    let all: Vec<Seen> = watch.wait_all().unwrap();
    let real = watch.file(0, "call.pcap").unwrap();
    for (run, seen) in all.iter().enumerate() {
        assert_eq!(seen.status, all[0].status, "{}", seen.text);
        assert!(
            watch.file(run, "call.pcap").unwrap() == real,
            "{}",
            seen.place
        );
    }
}
