//! Clients of the VDE socket protocol that are honest and that are not, on a switch that a thread of
//! the test serves. As root, for the parts with several users.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vnplug_switch::Switch;
use vnplug_testing::{TestDir, eventually};

use self::clients::{Client, Vde, ask, bound, config};
use self::served::{ALL, frame};

#[expect(dead_code, reason = "for tests that change settings")]
mod clients;
mod served;

#[test]
fn clients_hear_what_is_for_them_and_a_capture_hears_all_once() {
    let switch = Vde::here(|_| {});
    let clients: Vec<Client> = (0..3).map(|_| Client::join(&switch.dir)).collect();
    let names = std::fs::read_dir(&switch.dir).unwrap();
    assert_eq!(names.count(), 4, "ctl and one for each client");
    eventually("all have joined", || switch.count("switch_ports") == 3);
    let mut sent = Vec::new();
    for (at, client) in clients.iter().enumerate() {
        let frame = frame(ALL, at as u8, 0, 60);
        client.send(&frame);
        for other in (0..3).filter(|other| *other != at) {
            assert_eq!(clients[other].next(), frame);
        }
        sent.push(frame);
    }
    for len in [14, 60, 1514, 9000] {
        let frame = frame(1, 0, 1, len);
        clients[0].send(&frame);
        assert_eq!(clients[1].next(), frame);
        sent.push(frame);
    }
    assert!(clients.iter().all(Client::has_nothing));
    assert_eq!(*switch.seen.lock().unwrap(), sent);
    eventually("all is counted", || switch.count("entered") == 7);
    assert_eq!((switch.count("unicast"), switch.count("flooded")), (4, 3));
    switch.check_sums();
    // Who goes leaves nothing behind.
    drop(clients);
    eventually("the ports are free", || switch.count("switch_ports") == 0);
    assert_eq!(switch.count("stations"), 0);
    assert_eq!(std::fs::read_dir(&switch.dir).unwrap().count(), 1);
    let dir = switch.dir.clone();
    drop(switch);
    assert!(!dir.exists());
}

#[test]
fn who_never_reads_costs_itself_only_and_finds_what_fits_in_order() {
    let switch = Vde::here(|_| {});
    let [sender, reader, sleeper] = [0; 3].map(|_| Client::join(&switch.dir));
    eventually("all have joined", || switch.count("switch_ports") == 3);
    let count = 20_000;
    // As many at a time as a reader's socket holds in any case.
    for round in 0..count / 50 {
        let numbers = round * 50..(round + 1) * 50;
        let frames = numbers.map(|number| frame(ALL, 0, number, 1000));
        let frames: Vec<_> = frames.collect();
        frames.iter().for_each(|frame| sender.send(frame));
        frames
            .iter()
            .for_each(|frame| assert_eq!(reader.next(), *frame));
    }
    eventually("all is counted", || {
        switch.count("entered") == u64::from(count)
    });
    let dropped = switch.count("out_dropped_full");
    switch.check_sums();
    let mut slept = Vec::new();
    sleeper
        .data
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut bytes = [0; 2000];
    while sleeper.data.recv(&mut bytes).is_ok() {
        slept.push(u32::from_be_bytes(bytes[14..18].try_into().unwrap()));
    }
    // The first that came, without a gap.
    assert_eq!(slept, (0..slept.len() as u32).collect::<Vec<_>>());
    assert_eq!(slept.len() as u64 + dropped, u64::from(count));
    assert!(slept.len() > 500, "{}", slept.len());
    sender.send(&frame(ALL, 0, count, 60));
    assert_eq!(
        u32::from_be_bytes(sleeper.next()[14..18].try_into().unwrap()),
        count
    );
}

#[test]
fn what_is_no_frame_is_counted_and_the_port_lives() {
    let switch = Vde::here(|_| {});
    let [one, other] = [0; 2].map(|_| Client::join(&switch.dir));
    eventually("both have joined", || switch.count("switch_ports") == 2);
    one.send(b"");
    one.send(&[7; 13]);
    one.send(&frame(ALL, 0, 0, 9239));
    let mut group = frame(ALL, 0, 0, 60);
    group[6] = 1;
    one.send(&group);
    let good = frame(ALL, 0, 0, 9238);
    one.send(&good);
    assert_eq!(other.next(), good);
    eventually("all is counted", || switch.count("entered") == 5);
    let dropped = ["in_dropped_short", "in_dropped_long", "in_dropped_source"];
    assert_eq!(dropped.map(|name| switch.count(name)), [2, 1, 1]);
    switch.check_sums();
}

#[test]
fn made_up_addresses_make_nobody_forgotten() {
    let switch = Vde::here(|config| {
        config.stations = (2000, 100);
    });
    let [one, other, liar] = [0; 3].map(|_| Client::join(&switch.dir));
    eventually("all have joined", || switch.count("switch_ports") == 3);
    one.send(&frame(ALL, 1, 0, 60));
    assert_eq!((other.next().len(), liar.next().len()), (60, 60));
    for number in 0..20_000_u32 {
        let mut frame = frame(1, 0, number, 60);
        frame[7..11].copy_from_slice(&number.to_be_bytes());
        liar.send(&frame);
        assert_eq!(one.next(), frame);
    }
    other.send(&frame(1, 2, 0, 60));
    assert_eq!(one.next(), frame(1, 2, 0, 60));
    assert!(liar.has_nothing(), "it was not flooded");
    eventually("all is counted", || switch.count("entered") == 20_002);
    assert_eq!(
        (switch.count("stations"), switch.count("unlearned")),
        (102, 19_900)
    );
    switch.check_sums();
}

#[test]
fn who_sends_descriptors_loses_its_port_and_nobody_else_does() {
    let switch = Vde::here(|_| {});
    let [one, other, liar] = [0; 3].map(|_| Client::join(&switch.dir));
    eventually("all have joined", || switch.count("switch_ports") == 3);
    let null = std::fs::File::open("/dev/null").unwrap();
    let fds = [null.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let bytes = frame(ALL, 9, 0, 60);
    let sent = sendmsg(
        &liar.data,
        &[IoSlice::new(&bytes)],
        &mut control,
        SendFlags::empty(),
    );
    match sent {
        // Linux ≥ 6.16 refuses them there.
        Err(error) => assert_eq!(error, rustix::io::Errno::PERM),
        Ok(_) => eventually("its port is closed", || switch.count("switch_ports") == 2),
    }
    one.send(&frame(ALL, 0, 7, 60));
    assert_eq!(other.next(), frame(ALL, 0, 7, 60));
}

#[test]
fn who_joins_and_leaves_without_end_fills_no_log() {
    static LINES: AtomicUsize = AtomicUsize::new(0);
    struct Counter;
    impl log::Log for Counter {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }
        fn log(&self, record: &log::Record<'_>) {
            let is_its = record.args().to_string().starts_with("noisy: port");
            LINES.fetch_add(usize::from(is_its), Ordering::Relaxed);
        }
        fn flush(&self) {}
    }
    log::set_logger(&Counter).unwrap();
    log::set_max_level(log::LevelFilter::Info);
    let switch = Vde::here(|config| config.name = "noisy".into());
    let begun = Instant::now();
    for _ in 0..400 {
        Client::join(&switch.dir);
    }
    eventually("all have gone", || switch.count("switch_ports") == 0);
    // NB: other tests of this process have lines of the same twenty.
    eventually("something is said", || {
        Client::join(&switch.dir);
        LINES.load(Ordering::Relaxed) > 0
    });
    let (lines, seconds) = (LINES.load(Ordering::Relaxed), begun.elapsed().as_secs() + 2);
    assert!(lines as u64 <= 20 * seconds, "{lines} in {seconds} s");
}

#[test]
fn ten_thousand_connections_keep_nobody_out() {
    let switch = Vde::here(|_| {});
    let ctl = switch.dir.join("ctl");
    let begun = Instant::now();
    // As many as may wait; all others are hung up, one after the other.
    let held: Vec<_> = (0..32)
        .map(|_| UnixStream::connect(&ctl).unwrap())
        .collect();
    let mut hung_up = 0;
    for _ in 0..10_000 {
        let mut socket = UnixStream::connect(&ctl).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        hung_up += u32::from(matches!(socket.read(&mut [0; 1]), Ok(0)));
    }
    // Those that wait are sent away after ten seconds: then others wait for a moment.
    assert!(hung_up >= 9_900, "{hung_up}");
    drop(held);
    eventually("there is room again", || {
        let path = switch.dir.join(".again");
        let _data = bound(&path);
        ask(&switch.dir, &path).is_some()
    });
    assert!(begun.elapsed() < Duration::from_secs(120));
}

#[test]
fn ports_are_limited_and_one_directory_has_one_switch() {
    let switch = Vde::here(|config| config.ports = (3, 3));
    let clients: Vec<Client> = (0..3).map(|_| Client::join(&switch.dir)).collect();
    let path = switch.dir.join(".more");
    let data = bound(&path);
    assert!(ask(&switch.dir, &path).is_none());
    drop(data);
    let error = Switch::open(config(&switch.dir)).err().unwrap().to_string();
    assert!(error.contains("another switch serves"), "{error}");
    drop(clients);
    eventually("a port is free", || switch.count("switch_ports") == 0);
    Client::join(&switch.dir);
}

#[test]
fn what_a_killed_switch_left_is_taken_over() {
    let home = TestDir::new("vde");
    let dir = home.0.clone();
    drop(UnixListener::bind(dir.join("ctl")).unwrap());
    drop(UnixDatagram::bind(dir.join("001.17")).unwrap());
    std::fs::write(dir.join("mine"), "").unwrap();
    std::fs::write(dir.join("1.2"), "").unwrap();
    let switch = Vde::new(config(&dir));
    let mut names: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|it| it.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["1.2", "ctl", "mine"]);
    Client::join(&dir);
    drop(switch);
    // It is not the switch's to remove.
    assert!(dir.join("mine").exists() && !dir.join("ctl").exists());
}

#[test]
fn a_directory_of_others_is_left_as_it_is() {
    let home = TestDir::new("vde");
    let dir = home.0.clone();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(dir.join("001.2"), "").unwrap();
    let error = Switch::open(config(&dir)).err().unwrap().to_string();
    assert!(error.contains("has other files"), "{error}");
    let mode = std::fs::metadata(&dir).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
}
