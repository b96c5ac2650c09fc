//! Filters in the kernel judge as they do in the daemon: the same programs, the same frames, run by
//! `BPF_PROG_TEST_RUN` as socket filters and as XDP programs. Needs root.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vnplug_filter::ebpf::{Book, KernelJudge, Wanted};
use vnplug_filter::libpcap::Library;
use vnplug_filter::{Instruction, Program, Trust};

#[path = "../src/packets.rs"]
mod packets;

use packets::{Random, cuts, frames};

const SNAPLEN: u32 = 262_144;
const ETHERNET: u32 = 1;
/// The kernel runs frames of one page, less its own headers.
const LONGEST: usize = 3_000;
/// The kernel frees programs later, in work items that wait for one lock. More than 1,024 of them (`WQ_MAX_ACTIVE`) in
/// front of the one that the holder of this lock waits for are a deadlock of the kernel (seen with Linux 6.18). So who loads
/// thousands of programs rests after some.
const LOADS_BEFORE_REST: usize = 64;
const REST: Duration = Duration::from_millis(50);

const EXPRESSIONS: &[&str] = &[
    "ip",
    "arp",
    "tcp port 80 and host 10.0.0.1",
    "portrange 1000-40000",
    "src host 10.0.0.1 and not dst host 10.0.0.2",
    "net 192.168.0.0 mask 255.255.0.0",
    "ip6 host 2001:db8::1",
    "ip6 net 2001:db8::/32",
    "ether src 02:00:00:00:00:01 or ether dst 02:00:00:00:00:02",
    "ether multicast",
    "vlan",
    "vlan 5 and tcp port 80",
    "vlan 5 and vlan 7 and udp",
    "mpls 1024 and ip",
    "mpls and mpls and host 10.0.0.1",
    "pppoes and tcp port 80",
    "greater 500",
    "len > 100 and len < 1000",
    "ip[6:2] & 0x1fff != 0",
    "ip[6:2] & 0x3fff != 0 and ip proto 17",
    "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
    "tcp[((tcp[12]&0xf0)>>2):4] = 0x47455420",
    "udp[8:2] > udp[4:2]",
    "ip[2:2] - ((ip[0]&0xf)<<2) > 100",
    "ip6[6] = 44 and ip6[40] = 17",
    "not (tcp or udp or arp)",
    "ip and not tcp port 22 and not udp portrange 5000-6000",
    "link[12:2] = 0x0800 and ip[len - 30] = 0",
    "((ip[0] * 3 + len) / (ip[1] + 1)) % 7 = 2",
    "ip[1] / (ip[8] - ip[9]) > 3 or ip[8] % (ip[9] & 1) = 0",
    "1 << (ip[1] & 63) = 0 or ip[8] ^ ip[9] = 0x51",
    "ether[150] = 0 or ether[600:4] > 7",
    "geneve and ip",
];

/// Both kinds of programs of one union.
struct Judges {
    socket: KernelJudge,
    xdp: KernelJudge,
    frags: KernelJudge,
}

impl Judges {
    fn load(programs: &[Arc<Program>]) -> Self {
        let wants = wants(programs);
        Self {
            socket: KernelJudge::socket(&wants).unwrap_or_else(|e| panic!("{programs:?}: {e}")),
            xdp: KernelJudge::xdp(&wants, false).unwrap_or_else(|e| panic!("{programs:?}: {e}")),
            frags: KernelJudge::xdp(&wants, true).unwrap_or_else(|e| panic!("{programs:?}: {e}")),
        }
    }

    /// Compares both with the daemon's judge; true if the frame is wanted.
    fn check(&self, programs: &[Arc<Program>], frame: &[u8], what: &str) -> bool {
        let wanted = programs
            .iter()
            .any(|it| it.run(frame, frame.len() as u32) != 0);
        let before = self.socket.rejected();
        let socket = self.socket.wants(frame).expect("run");
        assert_eq!(socket, wanted, "{what}: socket filter: {frame:02x?}");
        assert_eq!(
            self.socket.rejected() - before,
            u64::from(!wanted),
            "{what}: counted"
        );
        if frame.len() >= 14 {
            let xdp = self.xdp.wants(frame).expect("run");
            assert_eq!(xdp, wanted, "{what}: XDP: {frame:02x?}");
            let xdp = self.frags.wants(frame).expect("run");
            assert_eq!(xdp, wanted, "{what}: XDP with frags: {frame:02x?}");
        }
        wanted
    }
}

fn wants(programs: &[Arc<Program>]) -> Vec<Wanted> {
    programs
        .iter()
        .map(|it| Wanted::new(None, Some(it)))
        .collect()
}

fn compile(expressions: &[&str]) -> Vec<Arc<Program>> {
    let library = Library::load().expect("libpcap is there");
    let one = |expression: &&str| {
        let text = CString::new(*expression).expect("no NUL");
        let list = library.compile(&text, SNAPLEN, ETHERNET);
        let list = list.unwrap_or_else(|error| panic!("{expression}: {error}"));
        Arc::new(Program::from_instructions(&list, Trust::Operator).expect(expression))
    };
    expressions.iter().map(one).collect()
}

#[test]
fn the_kernel_judges_300000_pairs_as_the_daemon_does() {
    let mut all: Vec<Vec<u8>> = frames(9_000, 0x5eed).into_iter().map(|(f, _)| f).collect();
    all.extend(cuts(4, 0xc07).into_iter().map(|(f, _)| f));
    all.retain(|frame| frame.len() <= LONGEST);
    let mut pairs = 0;
    for (expression, program) in EXPRESSIONS.iter().zip(compile(EXPRESSIONS)) {
        let programs = [program];
        let judges = Judges::load(&programs);
        let wanted = all
            .iter()
            .filter(|frame| judges.check(&programs, frame, expression));
        let wanted = wanted.count();
        pairs += all.len();
        // Frames worth the name: each filter takes some and leaves some.
        assert!(wanted > 0 && wanted < all.len(), "{expression}: {wanted}");
    }
    assert!(pairs > 300_000, "{pairs}");
}

#[test]
fn a_union_wants_what_one_of_its_filters_wants() {
    let all = frames(4_000, 0x0417);
    let unions: &[&[&str]] = &[
        &[],
        &["vlan 5 and tcp port 80", "ip6 host 2001:db8::1", "mpls"],
        &[
            "tcp port 22",
            "len > 800",
            "tcp[((tcp[12]&0xf0)>>2):4] = 0x47455420",
            "arp",
        ],
        &[
            "udp port 53",
            "ip6 proto 44",
            "ip[6:2] & 0x1fff != 0",
            "pppoes 1",
        ],
    ];
    for expressions in unions {
        let programs = compile(expressions);
        let judges = Judges::load(&programs);
        let mut wanted = 0;
        for (frame, _) in all.iter().filter(|(frame, _)| frame.len() <= LONGEST) {
            wanted += usize::from(judges.check(&programs, frame, &expressions.join(" | ")));
        }
        assert_eq!(wanted > 0, !expressions.is_empty());
    }
    // Whatever stands beside a filter that wants everything.
    let all_of_it = [compile(&["arp"]).remove(0), Arc::new(Program::accept(1))];
    assert!(Judges::load(&all_of_it).check(&all_of_it, &[0; 60], "everything"));
}

#[test]
fn random_programs_judge_alike_and_the_verifier_takes_them_all() {
    let frames = frames(64, 0xf00d);
    let mut random = Random(0x0bad_cafe);
    let (mut loaded, mut wanted) = (0, 0);
    for _ in 0..4_000 {
        let len = 1 + random.below(24);
        let list: Vec<_> = (0..len)
            .map(|at| instruction(&mut random, len - at))
            .chain([ret()])
            .collect();
        let Ok(program) = Program::from_instructions(&list, Trust::Guest) else {
            continue;
        };
        loaded += 1;
        if loaded % LOADS_BEFORE_REST == 0 {
            std::thread::sleep(REST);
        }
        let programs = [Arc::new(program)];
        let judges = Judges::load(&programs);
        for (frame, _) in frames.iter().skip(random.below(56)).take(8) {
            if frame.len() <= LONGEST {
                wanted += usize::from(judges.check(&programs, frame, &format!("{list:?}")));
            }
        }
    }
    assert!(
        loaded > 1_000 && wanted > 1_000,
        "{loaded} loaded, {wanted} wanted"
    );
}

#[test]
fn a_frame_that_is_longer_in_the_kernel_is_wanted_whenever_its_cut_is() {
    let all: Vec<_> = frames(400, 0x1e55)
        .into_iter()
        .filter(|(f, _)| f.len() <= LONGEST)
        .collect();
    let mut kept = 0;
    for (expression, program) in EXPRESSIONS.iter().zip(compile(EXPRESSIONS)) {
        let judge = KernelJudge::socket(&[Wanted::new(None, Some(&program))]).expect("load");
        for (frame, _) in &all {
            let whole = judge.wants(frame).expect("run");
            for snaplen in [14, 34, 40, 64, 96] {
                let cut = &frame[..snaplen.min(frame.len())];
                let wanted = program.run(cut, frame.len() as u32) != 0;
                kept += usize::from(wanted);
                assert!(whole || !wanted, "{expression}: {frame:02x?}");
            }
        }
    }
    assert!(kept > 1_000, "{kept}");
}

#[test]
fn a_guard_and_a_filter_both_have_to_want_a_frame() {
    let all = frames(3_000, 0x96a4d);
    let never = Arc::new(Program::accept(0));
    let mut pairs: Vec<(Arc<Program>, Arc<Program>)> = Vec::new();
    let list = compile(&[
        "ip",
        "tcp port 80",
        "not host 10.0.0.1",
        "vlan",
        "greater 200",
    ]);
    for guard in &list {
        pairs.extend(
            list.iter()
                .map(|filter| (Arc::clone(guard), Arc::clone(filter))),
        );
    }
    pairs.push((Arc::clone(&never), Arc::clone(&list[0])));
    pairs.push((Arc::clone(&list[0]), never));
    let judges = pairs.iter().map(|(guard, filter)| {
        let wants = [Wanted::new(Some(guard), Some(filter))];
        (
            guard,
            filter,
            KernelJudge::socket(&wants).unwrap(),
            KernelJudge::xdp(&wants, false).unwrap(),
        )
    });
    for (guard, filter, socket, xdp) in judges {
        for (frame, _) in all
            .iter()
            .filter(|(f, _)| (14..=LONGEST).contains(&f.len()))
        {
            let len = frame.len() as u32;
            let wanted = guard.run(frame, len) != 0 && filter.run(frame, len) != 0;
            assert_eq!(socket.wants(frame).unwrap(), wanted, "{guard:?} {filter:?}");
            assert_eq!(xdp.wants(frame).unwrap(), wanted, "{guard:?} {filter:?}");
        }
    }
}

#[test]
fn a_frame_of_several_buffers_is_judged_whole() {
    let texts = [
        "len = 9000",
        "ether[8990:4] = 0x01010101",
        "ether[4090:4] = 0x01010101 and ether[ether[0] * 20:2] = 257",
        "ether[8998:4] = 0x01010101",
        "not ether[8999] = 1",
    ];
    for (text, program) in texts.iter().zip(compile(&texts)) {
        let judge = KernelJudge::xdp(&[Wanted::exactly(&program)], true).expect(text);
        let mut frame = vec![1; 9_000];
        frame[0] = 250;
        let wanted = program.run(&frame, 9_000) != 0;
        assert_eq!(judge.wants(&frame).expect(text), wanted, "{text}");
    }
}

#[test]
fn a_filter_that_loops_limits_nothing() {
    let back = Instruction {
        code: 0x05,
        jt: 0,
        jf: 0,
        k: (-1_i32).cast_unsigned(),
    };
    let looping = Program::from_instructions(&[back, ret()], Trust::Operator).unwrap();
    assert!(looping.loops());
    let looping = Arc::new(looping);
    assert!(Wanted::new(None, Some(&looping)).is_everything());
    let arp = compile(&["arp"]).remove(0);
    let wanted = Wanted::new(Some(&arp), Some(&looping));
    assert_eq!(wanted, Wanted::new(Some(&arp), None));
    // What nobody limits is let through.
    let everything = KernelJudge::socket(&[Wanted::default()]).unwrap();
    assert!(everything.wants(&[0; 60]).unwrap());
}

#[test]
fn a_word_of_the_book_puts_a_filter_out_and_another_generation_passes_everything() {
    // One filter in each word of the book.
    let texts: Vec<String> = (0..40).map(|port| format!("udp port {port}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let wants = wants(&compile(&texts));
    let book = Arc::new(Book::of_processors("vnplug_judge").expect("a book"));
    let judge = KernelJudge::socket_by(&book, 7, &wants).expect("load");
    let frame = |port: u16| {
        let mut frame = vec![0_u8; 60];
        frame[12..14].copy_from_slice(&[0x08, 0x00]);
        frame[14] = 0x45;
        frame[23] = 17;
        frame[34..36].copy_from_slice(&port.to_be_bytes());
        frame[36..38].copy_from_slice(&999_u16.to_be_bytes());
        frame
    };
    let passes = |port: u16| judge.wants(&frame(port)).expect("run");
    // Of another generation: everything.
    assert!(passes(3) && passes(35) && passes(99));
    book.set(7, u64::MAX);
    assert!(passes(3) && passes(35) && !passes(99));
    book.set(7, !(1 << 3) & !(1 << 35));
    assert!(!passes(3) && !passes(35) && passes(4) && passes(36));
    book.set(7, 0);
    assert!(!passes(4) && !passes(36));
    book.set(8, 0);
    assert!(passes(4) && passes(99));
    assert_eq!(judge.rejected(), 5);
    // Without any filter, too.
    let none = KernelJudge::socket_by(&book, 9, &[]).expect("load");
    assert!(none.wants(&frame(1)).expect("run"));
    book.set(9, 0);
    assert!(!none.wants(&frame(1)).expect("run"));
    // Both count in one memory.
    assert_eq!((none.rejected(), book.all_dropped()), (6, 6));
}

#[test]
fn a_program_never_takes_the_bits_of_another_generation_for_its_own() {
    const RUNS: u32 = 1_000_000;
    let wants = wants(&compile(&["len > 0", "arp"]));
    // While it runs, the filters get other numbers, again and again. `next`: of which generation.
    let rejected = |next: u32| {
        let book = Arc::new(Book::of_processors("vnplug_judge").expect("a book"));
        let judge = KernelJudge::socket_by(&book, 1, &wants).expect("load");
        book.set(1, 0b01);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    book.set(next, 0b10);
                    book.set(1, 0b01);
                }
            });
            let ran = judge.nanoseconds(&[0; 60], RUNS);
            over.store(true, Ordering::Relaxed);
            ran.expect("run");
        });
        judge.rejected()
    };
    assert_eq!(rejected(2), 0);
    // The control: with the same generation it does.
    assert!(rejected(1) > 0);
}

fn ret() -> Instruction {
    Instruction {
        code: 0x16,
        jt: 0,
        jf: 0,
        k: 0,
    }
}

/// An instruction that is likely to pass, with `left` after it.
fn instruction(random: &mut Random, left: usize) -> Instruction {
    let known = [
        0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x07, 0x0c, 0x14, 0x15, 0x1c, 0x1d, 0x20, 0x24, 0x25,
        0x28, 0x2c, 0x2d, 0x30, 0x34, 0x35, 0x3c, 0x3d, 0x40, 0x44, 0x45, 0x48, 0x4c, 0x4d, 0x50,
        0x54, 0x5c, 0x60, 0x61, 0x64, 0x6c, 0x74, 0x7c, 0x80, 0x81, 0x84, 0x87, 0x94, 0x9c, 0xa4,
        0xac, 0xb1, 0x06, 0x16,
    ];
    let code = random.pick(&known);
    let k = match random.below(8) {
        0 if code != 0x05 => random.next(),
        1 if code != 0x05 => {
            random.pick(&[0, 1, u32::MAX, 0x7fff_ffff, 0x8000_0000, 31, 32, 65_535])
        }
        _ => random.below(left.min(16)) as u32,
    };
    Instruction {
        code,
        jt: random.below(left.min(3)) as u8,
        jf: random.below(left.min(3)) as u8,
        k,
    }
}

#[test]
#[ignore = "a measurement: cargo test -p vnplugd --test ebpf cost -- --ignored --nocapture"]
fn cost_of_a_union_by_the_number_of_its_filters() {
    // As the daemon's thread loads it: without CAP_PERFMON the kernel adds barriers.
    let mut sets = rustix::thread::capabilities(None).expect("capabilities");
    sets.effective = rustix::thread::CapabilitySet::BPF;
    rustix::thread::set_capabilities(None, sets).expect("set capabilities");
    let frame = {
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14..24].copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17]);
        frame[26..34].copy_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
        frame[34..38].copy_from_slice(&[0, 9, 0, 9]);
        frame
    };
    for shape in ["host 10.0.N", "host 10.0.N and tcp port 80", "udp port N"] {
        for filters in [0_u32, 1, 4, 16, 64] {
            let texts: Vec<String> = (1..=filters)
                .map(|n| match shape.contains("host") {
                    true => shape.replace('N', &format!("{}.{}", n / 256, n % 256)),
                    false => shape.replace('N', &(1_000 + n).to_string()),
                })
                .collect();
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let programs = compile(&texts);
            let instructions: usize = programs.iter().map(|it| it.instructions().len()).sum();
            let begun = std::time::Instant::now();
            let judge = match KernelJudge::socket(&wants(&programs)) {
                Ok(judge) => judge,
                Err(error) => {
                    println!("{shape:28} {filters:4}: {error}");
                    continue;
                }
            };
            let took = begun.elapsed();
            assert!(!judge.wants(&frame).unwrap());
            let mut runs: Vec<u32> = (0..9)
                .map(|_| judge.nanoseconds(&frame, 100_000).unwrap())
                .collect();
            runs.sort_unstable();
            println!(
                "{shape:28} {filters:4} filters, {instructions:5} instructions: loaded in \
                 {took:9.3?}, {} ns per frame ({} to {})",
                runs[4], runs[0], runs[8]
            );
        }
    }
}
