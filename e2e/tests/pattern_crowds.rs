//! Crowds of interfaces that come and go as the sources of a pattern: whoever asks the daemon meanwhile is answered soon.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use vnplug::{Client, SourceRequest};
use vnplug_e2e::bombs::UnansweredPage;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::raw::Raw;
use vnplug_e2e::user::open_to_all;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::Message;
use vnplug_testing::{eventually, until};

/// The number of interfaces; with `VNPLUG_LONG=1` in the environment that of the long run.
fn crowd() -> usize {
    match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1000,
        None => 100,
    }
}

/// As many, but not too few to be opened in more than a moment.
fn many() -> usize {
    crowd().max(200)
}

fn batch(netns: &Netns, lines: &str) {
    let mut command = netns.command("ip");
    let command = command.args(["-batch", "-"]).stdin(Stdio::piped());
    let mut ip = command.spawn().unwrap();
    let mut input = ip.stdin.take().unwrap();
    input.write_all(lines.as_bytes()).unwrap();
    drop(input);
    assert!(ip.wait().unwrap().success());
}

/// What ends when the test does, or panics.
struct Ends<T: Fn()>(T);

impl<T: Fn()> Drop for Ends<T> {
    fn drop(&mut self) {
        self.0();
    }
}

/// Rings of 64 KiB: what matters here is how many there are.
const SMALL: &str = "block_size=32K,blocks=2,snaplen=2048";

fn pattern(size: usize) -> String {
    format!("crowd*=af_packet,members={size},{SMALL}")
}

/// One of them by its name.
fn named(n: usize) -> String {
    format!("crowd{n}=af_packet,{SMALL}")
}

fn crowd_comes(netns: &Netns, size: usize) {
    let line = |n: usize| {
        format!("link add crowd{n} group 7 type veth peer name far{n}\nlink set crowd{n} up\n")
    };
    batch(netns, &(0..size).map(line).collect::<String>());
}

fn count(daemon: &Daemon) -> usize {
    let devices = Client::connect_to(&daemon.socket()).unwrap().devices();
    devices.unwrap().len()
}

#[test]
fn who_asks_is_answered_soon_while_interfaces_come_and_go_in_crowds() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let size = crowd();
    let pattern = pattern(size);
    let args = [
        "--source",
        "kept=gen,pps=100",
        "--source",
        "wire0",
        "--source",
        &pattern,
    ];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let (ends, began) = (AtomicBool::new(false), Instant::now());
    let (asked, greeted) = thread::scope(|scope| {
        let end = Ends(|| ends.store(true, Ordering::Relaxed));
        let asks = |what: fn(&mut Client, &Daemon)| {
            let mut client = Client::connect_to(&daemon.socket()).unwrap();
            let (daemon, ends) = (&daemon, &ends);
            scope.spawn(move || {
                let mut times = Vec::new();
                while !ends.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    what(&mut client, daemon);
                    times.push(begun.elapsed());
                    thread::sleep(Duration::from_millis(10));
                }
                times
            })
        };
        let asked = asks(|client, _| drop(client.devices().unwrap()));
        let greeted = asks(|_, daemon| drop(Client::connect_to(&daemon.socket()).unwrap()));
        crowd_comes(&netns, size);
        until("all are sources", || count(&daemon), |all| *all == size + 2);
        println!("{size} came in {:?}", began.elapsed());
        let begun = Instant::now();
        batch(&netns, "link del group 7\n");
        until("none is left", || count(&daemon), |all| *all == 2);
        println!("{size} went in {:?}", begun.elapsed());
        drop(end);
        (asked.join().unwrap(), greeted.join().unwrap())
    });
    for (what, times) in [("a list", asked), ("a greeting", greeted)] {
        let longest = times.iter().max().unwrap();
        println!("{what}: {} times, the longest {longest:?}", times.len());
        assert!(*longest < SOON, "{what}: {longest:?}");
    }
    daemon.audit();
}

#[test]
fn a_crowd_that_is_there_is_received_when_the_daemon_serves() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let size = crowd();
    crowd_comes(&netns, size);
    let began = Instant::now();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", &pattern(size)]).unwrap();
    println!("{size} were received after {:?}", began.elapsed());
    // The daemon serves after ten seconds, whoever is not open yet.
    if began.elapsed() < SETTLING {
        assert_eq!(count(&daemon), size);
    }
    until("all are sources", || count(&daemon), |all| *all == size);
    println!("{size} were there after {:?}", began.elapsed());
}

/// The arguments of a daemon that has these sources.
fn by_name(texts: impl Iterator<Item = String>) -> Vec<String> {
    texts.flat_map(|it| ["--source".into(), it]).collect()
}

fn start(lab: &Lab, netns: &Netns, args: &[String]) -> Daemon {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Daemon::start(lab, Some(netns), &args).unwrap()
}

/// As the sources of a pattern, and by their names when the daemon starts.
#[test]
fn a_crowd_is_open_in_half_the_time_that_it_takes_one_by_one() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let size = many();
    crowd_comes(&netns, size);
    let daemon = Daemon::start(&lab, Some(&netns), &[]).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut change = |request| drop(client.change_sources(request).unwrap());
    let mut opened = |texts: Vec<String>, count_of: usize| {
        let begun = Instant::now();
        for text in texts.clone() {
            // Who adds one waits until it is open.
            change(SourceRequest::Add { text, keep: false });
        }
        until("all are sources", || count(&daemon), |it| *it == count_of);
        let took = begun.elapsed();
        for text in texts {
            let (name, _) = text.split_once('=').unwrap();
            let name = name.to_owned();
            change(SourceRequest::Remove { name });
        }
        until("none is left", || count(&daemon), |left| *left == 0);
        took
    };
    let by_name = by_name((0..size).map(named));
    let started = || {
        let begun = Instant::now();
        let mut daemon = start(&lab, &netns, &by_name);
        let took = begun.elapsed();
        assert_eq!(count(&daemon), size);
        let begun = Instant::now();
        daemon.end();
        println!("a daemon of {size} ended in {:?}", begun.elapsed());
        took
    };
    // Others who make and delete interfaces make either of them late.
    for _ in 0..TRIES {
        let each = opened((0..ONE_BY_ONE).map(named).collect(), ONE_BY_ONE) / ONE_BY_ONE as u32;
        let (took, started) = (opened(vec![pattern(size)], size), started());
        println!("{size} in {took:?}, by name in {started:?}, one by one each in {each:?}");
        // The premise: one who is alone waits for the kernel most of the time.
        if each <= WAITED {
            println!("NOT COMPARED: one by one none waits for {WAITED:?}");
            return;
        }
        if took.max(started) < each * size as u32 / 2 {
            return;
        }
    }
    panic!("one after the other would be as soon");
}

#[test]
fn of_named_sources_that_cannot_be_opened_the_first_is_told() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    crowd_comes(&netns, 30);
    let mut texts: Vec<String> = (0..30).map(named).collect();
    // Both are opened at the same time, with those around them.
    texts.insert(10, "first".into());
    texts.insert(12, "second".into());
    let args = by_name(texts.into_iter());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    // Whoever of them the kernel answers first.
    for _ in 0..10 {
        let mut daemon = Daemon::unstarted(&lab, Some(&netns), &args).unwrap();
        let error = daemon.launch().unwrap_err().to_string();
        let told = "no interface \"first\" here; list them with: ip link";
        assert!(error.contains(told), "{error}");
        assert!(!error.contains("\"second\""), "{error}");
    }
}

/// How long each of a few takes to be open that are added one by one: whoever opens or closes one waits for the kernel, and for the same.
fn each_alone(client: &mut Client) -> Duration {
    let mut change = |request| drop(client.change_sources(request).unwrap());
    let begun = Instant::now();
    for text in (0..ONE_BY_ONE).map(named) {
        change(SourceRequest::Add { text, keep: false });
    }
    let each = begun.elapsed() / ONE_BY_ONE as u32;
    for n in 0..ONE_BY_ONE {
        let name = format!("crowd{n}");
        change(SourceRequest::Remove { name });
    }
    each
}

/// Whether this took less than half the time that `size` of them take one by one.
fn is_soon(took: Duration, each: Duration, size: usize) -> bool {
    // The premise: one who is alone waits for the kernel most of the time.
    if each <= WAITED {
        println!("NOT COMPARED: one by one none waits for {WAITED:?}");
        return true;
    }
    took < each * size as u32 / 2
}

#[test]
fn a_start_that_fails_has_closed_a_crowd_in_half_the_time_that_it_takes_one_by_one() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let size = many();
    crowd_comes(&netns, size);
    let other = Daemon::start(&lab, Some(&netns), &[]).unwrap();
    let mut client = Client::connect_to(&other.socket()).unwrap();
    let mut args = by_name((0..size).map(named));
    args.extend(["--allow", "uid:1=crowd0:port nonsense"].map(str::to_owned));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    for _ in 0..TRIES {
        let each = each_alone(&mut client);
        let mut daemon = Daemon::unstarted(&lab, Some(&netns), &args).unwrap();
        let begun = Instant::now();
        let error = daemon.launch().unwrap_err().to_string();
        let took = begun.elapsed();
        println!("a start of {size} failed in {took:?}, one by one each in {each:?}");
        assert!(error.contains("port nonsense"), "{error}");
        if is_soon(took, each, size) {
            return;
        }
    }
    panic!("one after the other they would be closed as soon");
}

fn fds(daemon: &Daemon) -> usize {
    let dir = format!("/proc/{}/fd", daemon.pid());
    fs::read_dir(dir).unwrap().count()
}

/// Asks for the sources until the daemon has as few descriptors as `before`; the longest time until it answered.
fn longest_answer(client: &mut Client, daemon: &Daemon, before: usize) -> Duration {
    let mut longest = Duration::ZERO;
    until(
        "what was opened is closed",
        || {
            let asked = Instant::now();
            client.devices().unwrap();
            longest = longest.max(asked.elapsed());
            fds(daemon)
        },
        |now| *now <= before,
    );
    longest
}

/// The configuration's tables of this number of sources.
fn tables(size: usize) -> String {
    let table = |n: usize| {
        format!(
            "[[source]]\nname = \"crowd{n}\"\nblock_size = \"32K\"\nblocks = 2\nsnaplen = 2048\n"
        )
    };
    (0..size).map(table).collect()
}

#[test]
fn what_a_reload_had_opened_that_fails_is_closed_beside_those_who_ask() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let size = many();
    crowd_comes(&netns, size);
    let file = open_to_all(&lab, "");
    let daemon = Daemon::start(&lab, Some(&netns), &["--config", &file]).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let write = |text: &str| drop(open_to_all(&lab, text));
    let limit = |most: Option<u64>| {
        let pid = Pid::from_raw(daemon.pid() as i32);
        let new = Rlimit {
            current: most,
            // The daemon's, too: it is inherited.
            maximum: getrlimit(Resource::Nofile).maximum,
        };
        prlimit(pid, Resource::Nofile, new).unwrap().current
    };
    // What the daemon opens once and keeps is open after the first; and what each of them takes is known.
    let empty = settled(|| fds(&daemon));
    write(&tables(size));
    client.change_sources(SourceRequest::Reload).unwrap();
    let each_has = (fds(&daemon) - empty) / size;
    write("");
    client.change_sources(SourceRequest::Reload).unwrap();
    let before = settled(|| fds(&daemon));
    let mut tries = || {
        let each = each_alone(&mut client);
        settled(|| fds(&daemon));
        write(&tables(size));
        // Who asked for it goes.
        let mut asks = Raw::greeted(&daemon.socket());
        asks.send(&Message::Sources(SourceRequest::Reload).encode(1, 0))
            .unwrap();
        eventually("they are being opened", || fds(&daemon) > before + 8);
        drop(asks);
        let gone = longest_answer(&mut client, &daemon, before);
        assert_eq!(client.devices().unwrap().len(), 0);
        // Descriptors are short when half of them are received: each needs one more then.
        let room = before + size * each_has - size / 2;
        let most = limit(Some(room as u64));
        let mut other = Client::connect_to(&daemon.socket()).unwrap();
        let (short, error) = thread::scope(|scope| {
            let reload = scope.spawn(move || other.change_sources(SourceRequest::Reload));
            let mut longest = Duration::ZERO;
            while !reload.is_finished() {
                let asked = Instant::now();
                client.devices().unwrap();
                longest = longest.max(asked.elapsed());
            }
            let error = reload.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("Too many open files"), "{error}");
            (longest, error)
        });
        limit(most);
        let there = client.devices().unwrap().len();
        let missing = format!("{} sources are not there", size - there);
        assert!(error.contains(&missing), "{error}, {there} are");
        // The control: some were, and others were not.
        assert!((1..size).contains(&there), "{there}");
        // The others come when there is room.
        client.change_sources(SourceRequest::Reload).unwrap();
        assert_eq!(client.devices().unwrap().len(), size);
        write("");
        client.change_sources(SourceRequest::Reload).unwrap();
        until("none is left", || fds(&daemon), |now| *now <= before);
        println!("{size}: {gone:?} and {short:?}, one by one each in {each:?}");
        is_soon(gone, each, size) && is_soon(short, each, size / 2)
    };
    assert!((0..TRIES).any(|_| tries()), "those who ask wait for them");
    daemon.audit();
}

/// A number, once it is the same for a while.
fn settled(count: impl Fn() -> usize) -> usize {
    let same = || {
        let seen = count();
        thread::sleep(Duration::from_millis(300));
        (count() == seen).then_some(seen)
    };
    until("it stays the same", same, Option::is_some).unwrap()
}

#[test]
fn interfaces_that_go_while_others_are_opened_leave_nothing() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let size = many();
    let daemon = Daemon::start(&lab, Some(&netns), &[]).unwrap();
    let fds = || fds(&daemon);
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut round = || {
        crowd_comes(&netns, size);
        let text = pattern(size);
        let add = SourceRequest::Add { text, keep: false };
        client.change_sources(add).unwrap();
        let open = until("some are open", || count(&daemon), |open| *open > 0);
        batch(&netns, "link del group 7\n");
        until("none is left", || count(&daemon), |left| *left == 0);
        let name = "crowd*".to_owned();
        client
            .change_sources(SourceRequest::Remove { name })
            .unwrap();
        open < size
    };
    // What the daemon opens once and keeps is open after the first.
    round();
    let before = settled(fds);
    let caught = (0..ROUNDS).filter(|_| round()).count();
    // The control: some were being opened, or were to be.
    assert!(caught > 0, "all were open each time");
    until("no descriptor stays", fds, |now| *now == before);
    assert!(!daemon.log().contains("is a bug"), "{}", daemon.log());
    daemon.audit();
}

#[test]
fn who_asks_does_not_wait_for_one_who_holds_the_kernels_lock_of_all_interfaces() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire0"]).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut mtu = || client.devices().unwrap()[0].mtu;
    assert_eq!(mtu(), 1500);
    let page = UnansweredPage::new().expect("root may have the kernel's page faults");
    let longest = thread::scope(|scope| {
        let end = Ends(|| page.release().unwrap());
        let holds = scope.spawn(|| netns.enter(|| page.hold_interfaces("wire1")));
        eventually("the lock is held", || page.is_awaited());
        // The control: who changes an interface waits.
        let changes = scope.spawn(|| netns.ip(&["link", "set", "wire0", "mtu", "1400"]));
        let (begun, mut longest) = (Instant::now(), Duration::ZERO);
        while begun.elapsed() < HELD {
            let asked = Instant::now();
            assert_eq!(mtu(), 1500);
            drop(Client::connect_to(&daemon.socket()).unwrap());
            longest = longest.max(asked.elapsed());
            thread::sleep(Duration::from_millis(10));
        }
        assert!(!changes.is_finished(), "nobody held the lock");
        drop(end);
        changes.join().unwrap().unwrap();
        holds.join().unwrap().unwrap().unwrap();
        longest
    });
    assert!(longest < SOON, "{longest:?}");
    until("it is asked again", mtu, |mtu| *mtu == 1400);
}

/// How long the lock is held, and in which time who asks is answered.
const HELD: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_secs(1);
/// How often they go while they are opened.
const ROUNDS: usize = 3;
/// How many are opened one by one, and how often it is tried whether many are open sooner.
const ONE_BY_ONE: usize = 40;
/// How long each takes at least, one by one, where the kernel makes it wait.
const WAITED: Duration = Duration::from_millis(3);
const TRIES: usize = 5;
/// How long the daemon waits at most, when it starts, for the sources of a pattern to be open.
const SETTLING: Duration = Duration::from_secs(10);
