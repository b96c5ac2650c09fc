//! What a back-end shares: it is read and written by both, taken back, and bounded.

use std::thread;
use std::time::{Duration, Instant};

use vnplug::{Error, Heard, Told};
use vnplug_e2e::Lab;
use vnplug_e2e::raw::Holdings;
use vnplug_ring::control::code;
use vnplug_testing::until;

use super::{back_end, channel, daemon, heard, joined, told};

#[test]
fn memory_is_shared_withdrawn_and_never_a_fault() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let mut program = channel(&daemon, "kv");
    let number = joined(&mut back);
    let region = back.share(number, 1 << 20, false).unwrap();
    let Told::Shared { region: same } = told(&mut program) else {
        panic!("no memory");
    };
    assert_eq!(region, same);
    back.memory(region)
        .unwrap()
        .write(4096, b"from the host")
        .unwrap();
    let mut read = [0; 13];
    let theirs = program.memory(region).unwrap();
    theirs.read(4096, &mut read).unwrap();
    assert_eq!(&read, b"from the host");
    assert_eq!((theirs.len(), theirs.is_writable()), (1 << 20, false));
    assert!(matches!(theirs.write(0, b"x"), Err(Error::Invalid(_))));
    assert!(matches!(
        theirs.read((1 << 20) - 3, &mut read),
        Err(Error::Invalid(_))
    ));
    // One that both write.
    let both = back.share(number, 100, true).unwrap();
    assert_eq!(told(&mut program), Told::Shared { region: both });
    program.memory(both).unwrap().store(8, 77).unwrap();
    assert_eq!(back.memory(both).unwrap().load(8).unwrap(), 77);
    // Taken back from one who lets go.
    let lets_go = thread::spawn(move || {
        let Told::Withdraw { region, .. } = told(&mut program) else {
            panic!("not asked");
        };
        program.release(region).unwrap();
        assert!(program.memory(region).is_none());
        program
    });
    assert!(back.withdraw(region, Duration::from_secs(10)).unwrap());
    let program = lets_go.join().unwrap();
    // And from one who does not listen: it maps zeros.
    let began = Instant::now();
    assert!(!back.withdraw(both, Duration::from_millis(200)).unwrap());
    assert!(began.elapsed() >= Duration::from_millis(200));
    let stays = program.memory(both).unwrap();
    assert_eq!(stays.load(8).unwrap(), 0);
    stays.store(8, 9).unwrap();
    assert!(back.withdraw(both, Duration::ZERO).is_err());
}

/// Its message may come together with the answer that opens the channel, and its descriptor with both.
#[test]
fn memory_that_is_shared_at_once_may_come_with_the_channel() {
    const CHANNELS: usize = 300;
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let shares = thread::spawn(move || {
        for _ in 0..CHANNELS {
            let number = joined(&mut back);
            for _ in 0..3 {
                back.share(number, 4096, false).unwrap();
            }
            back.send(number, b"all").unwrap();
            assert!(matches!(heard(&mut back), Heard::Left { .. }));
        }
    });
    for _ in 0..CHANNELS {
        let mut program = channel(&daemon, "kv");
        for _ in 0..3 {
            let Told::Shared { region } = told(&mut program) else {
                panic!("no memory");
            };
            assert_eq!(program.memory(region).unwrap().load(0).unwrap(), 0);
        }
        assert_eq!(told(&mut program), Told::Message(b"all".to_vec()));
    }
    shares.join().unwrap();
}

#[test]
fn what_a_back_end_shares_is_bounded_and_free_again() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon, 85, "kv");
    let before = Holdings::at_rest(daemon.pid()).fds;
    for _ in 0..20 {
        let program = channel(&daemon, "kv");
        let number = joined(&mut back);
        back.share(number, 4 << 20, true).unwrap();
        let Err(Error::Refused {
            code: code::LIMIT,
            text,
        }) = back.share(number, 1, true)
        else {
            panic!("more than the grant permits");
        };
        assert!(text.contains("memory="), "{text}");
        assert!(back.share(number, 0, true).is_err() && back.share(99_999, 1, true).is_err());
        drop(program);
        assert!(matches!(heard(&mut back), Heard::Left { .. }));
    }
    let now = || Holdings::of(daemon.pid()).fds;
    until("what was shared is closed", now, |now| *now <= before);
}
