//! One decision, in two programs of the kernel, of which the second is run by the daemon, too.
//!
//! ```text
//! frame → packet socket's filter (the gate) ── upcall ──→ the socket's ring, to the daemon
//!              │ verdict, in the processor's slot
//!              v
//!         classifier at the interface ── forward ──→ the other port's interface
//!                                     └─ else ────→ dropped here: the host's stack gets nothing
//! ```
//!
//! The kernel shows a frame to packet sockets first, and to the classifier right after, on the same processor and
//! before any other frame. So the gate decides, and leaves what it decided in the processor's slot, with the
//! frame's addresses; the classifier takes it from there. Each frame is judged once, whatever the daemon changes
//! meanwhile, and goes one way. A slot that is empty, or of other addresses, means that no gate saw the frame, because
//! no daemon is there: then the classifier decides, and what would be an upcall is dropped and counted.
//!
//! **In the daemon** ([`judge`](super::judge)) the classifier is told of an interface that no kernel has: a port's number with
//! the highest bit. Then it polices the port, takes no verdict of a gate, counts nothing, and says by the same kind of
//! number where the frame goes: to any port, not only to those that the kernel reaches.

use vnplug_os::bpf::asm::{
    Alu, Asm, Cond, FP, Label, Operand, R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, Reg, Size, TooFar,
};
use vnplug_os::bpf::{Insn, Shared};

use super::layout::{
    CPU_BYTES, CPUS_AT, DOOR_PROBES, DOORS, DOORS_AT, Layout, PORT_BYTES, UPCALL, header, port,
};
use crate::table::Slots;

/// What programs are made for.
pub(super) struct Parts<'a> {
    pub(super) state: &'a Shared,
    pub(super) table: &'a Shared,
    pub(super) layout: Layout,
}

impl Parts<'_> {
    /// The filter of ports' packet sockets.
    pub(super) fn gate(&self, snaplen: u32) -> Result<Vec<Insn>, TooFar> {
        let mut asm = Asm::default();
        let [upcall, verdict, whole, nothing, drop] = std::array::from_fn(|_| asm.label());
        asm.alu64(Alu::Mov, R6, Operand::X(R1));
        asm.load(Size::Word, R1, R6, PKT_TYPE);
        asm.jump_if(Cond::Eq, R1, Operand::K(OUTGOING), nothing);
        asm.alu64(Alu::Mov, R1, Operand::X(R6));
        asm.alu64(Alu::Mov, R2, Operand::K(0));
        stack(&mut asm, R3, HEAD);
        asm.alu64(Alu::Mov, R4, Operand::K(ADDRESSES));
        asm.call(SKB_LOAD_BYTES);
        // It is too short for addresses.
        asm.jump_if(Cond::Ne, R0, Operand::K(0), whole);
        keys(&mut asm, FP, HEAD);
        self.decide(&mut asm, upcall, drop, true);
        set_bit(&mut asm, R7, FORWARD);
        asm.jump(verdict);
        asm.bind(drop);
        asm.alu64(Alu::Mov, R7, Operand::K(0));
        set_bit(&mut asm, R7, DROP);
        asm.jump(verdict);
        asm.bind(upcall);
        asm.alu64(Alu::Mov, R7, Operand::K(0));
        set_bit(&mut asm, R7, TO_DAEMON);
        asm.bind(verdict);
        self.slot(&mut asm);
        asm.load(Size::Double, R1, FP, TO);
        asm.store(Size::Double, R0, 0, R1);
        asm.load(Size::Double, R1, FP, FROM);
        asm.store(Size::Double, R0, 8, R1);
        asm.store(Size::Double, R0, 16, R7);
        asm.alu64(Alu::Shr, R7, Operand::K(TO_DAEMON));
        asm.jump_if(Cond::Ne, R7, Operand::K(1), nothing);
        asm.bind(whole);
        asm.alu64(Alu::Mov, R0, Operand::K(snaplen));
        asm.exit();
        asm.bind(nothing);
        asm.alu64(Alu::Mov, R0, Operand::K(0));
        asm.exit();
        asm.finish()
    }

    /// The classifier at ports' interfaces.
    pub(super) fn classifier(&self) -> Result<Vec<Insn>, TooFar> {
        let mut asm = Asm::default();
        let [alone, forward, lost, drop, inner] = std::array::from_fn(|_| asm.label());
        asm.alu64(Alu::Mov, R6, Operand::X(R1));
        asm.load(Size::Word, R1, R6, DATA);
        asm.load(Size::Word, R2, R6, DATA_END);
        asm.alu64(Alu::Mov, R3, Operand::X(R1));
        asm.alu64(Alu::Add, R3, Operand::K(ADDRESSES));
        asm.jump_if(Cond::Gt, R3, Operand::X(R2), drop);
        keys(&mut asm, R1, 0);
        asm.value(R9, self.state.map());
        asm.load(Size::Word, R1, R6, IFINDEX);
        asm.alu64(Alu::Shr, R1, Operand::K(INNER));
        asm.jump_if(Cond::Ne, R1, Operand::K(0), inner);
        self.slot(&mut asm);
        asm.load(Size::Double, R7, R0, 16);
        asm.jump_if(Cond::Eq, R7, Operand::K(0), alone);
        for (in_slot, own) in [(0, TO), (8, FROM)] {
            asm.load(Size::Double, R1, R0, in_slot);
            asm.load(Size::Double, R2, FP, own);
            asm.jump_if(Cond::Ne, R1, Operand::X(R2), alone);
        }
        asm.store_k(Size::Double, R0, 16, 0);
        asm.alu64(Alu::Mov, R1, Operand::X(R7));
        asm.alu64(Alu::Shr, R1, Operand::K(FORWARD));
        asm.jump_if(Cond::Eq, R1, Operand::K(0), drop);
        asm.jump(forward);
        asm.bind(alone);
        asm.load(Size::Double, R7, FP, TO);
        self.decide(&mut asm, lost, drop, false);
        asm.bind(forward);
        asm.alu32(Alu::Mov, R1, Operand::X(R7));
        asm.alu64(Alu::Mov, R2, Operand::K(0));
        asm.call(REDIRECT);
        asm.exit();
        asm.bind(lost);
        asm.alu64(Alu::Mov, R1, Operand::K(1));
        asm.atomic_add_at(R9, header::LOST as i16, R1);
        asm.bind(drop);
        asm.alu64(Alu::Mov, R0, Operand::K(SHOT));
        asm.exit();
        asm.bind(inner);
        self.inner(&mut asm, drop);
        asm.finish()
    }

    /// For the daemon, of a frame of any port of its.
    fn inner(&self, asm: &mut Asm, drop: Label) {
        let refer = asm.label();
        asm.load(Size::Word, R4, R6, IFINDEX);
        asm.alu64(Alu::And, R4, Operand::K((1 << INNER) - 1));
        asm.store(Size::Double, FP, NUMBER_IN, R4);
        self.port(asm, R4);
        asm.store(Size::Double, FP, PORT_IN, R4);
        asm.load(Size::Word, R1, R6, WIRE_LEN);
        asm.store(Size::Double, FP, LEN, R1);
        self.clock(asm);
        // Also what is for many, or is judged by somebody else.
        self.police(asm, drop, false);
        self.for_one(asm, refer);
        asm.load(Size::Double, R4, FP, PORT_IN);
        asm.load(Size::Double, R1, R4, port::WORD as i16);
        asm.alu64(Alu::Shr, R1, Operand::K(32));
        asm.jump_if(Cond::Set, R1, Operand::K(UPCALL), refer);
        self.stations(asm, refer);
        asm.alu64(Alu::Shr, R3, Operand::K(32));
        asm.jump_if(Cond::Set, R3, Operand::K(UPCALL), refer);
        asm.load(Size::Double, R1, FP, NUMBER_OUT);
        set_bit(asm, R1, INNER);
        asm.alu64(Alu::Mov, R2, Operand::K(0));
        asm.call(REDIRECT);
        asm.exit();
        asm.bind(refer);
        asm.alu64(Alu::Mov, R0, Operand::K(REFER));
        asm.exit();
    }

    /// Decides: goes on with the word of the port that has the frame in R7, and has counted it; or is at `upcall`, or
    /// at `drop`. R7 and R8 have the addresses, which lie on the stack, too; R6 the context. R9 is the state in any case.
    fn decide(&self, asm: &mut Asm, upcall: Label, drop: Label, minds_aside: bool) {
        asm.value(R9, self.state.map());
        if minds_aside {
            asm.load(Size::Double, R1, R9, header::ASIDE as i16);
            asm.jump_if(Cond::Ne, R1, Operand::K(0), upcall);
        }
        self.for_one(asm, upcall);
        self.length(asm, upcall);
        self.door(asm, upcall);
        asm.load(Size::Double, R1, R4, port::WORD as i16);
        asm.alu64(Alu::Shr, R1, Operand::K(32));
        asm.jump_if(Cond::Set, R1, Operand::K(UPCALL), upcall);
        asm.store(Size::Double, FP, PORT_IN, R4);
        self.clock(asm);
        self.stations(asm, upcall);
        asm.alu32(Alu::Mov, R4, Operand::X(R3));
        asm.jump_if(Cond::Eq, R4, Operand::K(0), upcall);
        asm.alu64(Alu::Mov, R4, Operand::X(R3));
        asm.alu64(Alu::Shr, R4, Operand::K(32));
        asm.jump_if(Cond::Set, R4, Operand::K(UPCALL), upcall);
        asm.alu64(Alu::Mov, R7, Operand::X(R3));
        asm.alu64(Alu::Mov, R8, Operand::X(R2));
        self.police(asm, drop, true);
        asm.load(Size::Double, R1, FP, PORT_IN);
        asm.load(Size::Double, R3, FP, LEN);
        asm.alu64(Alu::Mov, R4, Operand::K(1));
        asm.atomic_add_at(R1, port::IN_FRAMES as i16, R4);
        asm.atomic_add_at(R1, port::IN_BYTES as i16, R3);
        asm.atomic_add_at(R8, port::OUT_FRAMES as i16, R4);
        asm.atomic_add_at(R8, port::OUT_BYTES as i16, R3);
    }

    /// It is from one station and for one.
    fn for_one(&self, asm: &mut Asm, other: Label) {
        for key in [R7, R8] {
            asm.alu64(Alu::Mov, R1, Operand::X(key));
            asm.alu64(Alu::Shr, R1, Operand::K(40));
            asm.jump_if(Cond::Set, R1, Operand::K(1), other);
        }
    }

    fn clock(&self, asm: &mut Asm) {
        asm.call(KTIME_GET_NS);
        asm.store(Size::Double, FP, NOW_NS, R0);
        asm.alu64(Alu::Div, R0, Operand::K(1_000_000_000));
        asm.store(Size::Double, FP, NOW_S, R0);
    }

    /// What the port may send: the frame is at `drop`, or has been sent. One bucket for both instances; who comes
    /// too late to move it on tries again, a few times, and then adds its frame without a look: others moved it on just
    /// now, and of each processor one frame at most is beyond the burst.
    fn police(&self, asm: &mut Asm, drop: Label, counts: bool) {
        let [may, policed] = std::array::from_fn(|_| asm.label());
        asm.load(Size::Double, R1, FP, PORT_IN);
        asm.load(Size::Double, R2, R1, port::RATE as i16);
        asm.jump_if(Cond::Eq, R2, Operand::K(0), may);
        asm.load(Size::Double, R3, FP, LEN);
        asm.alu64(Alu::Mul, R3, Operand::X(R2));
        asm.alu64(Alu::Shr, R3, Operand::K(10));
        asm.load(Size::Double, R4, R1, port::BURST as i16);
        asm.load(Size::Double, R2, FP, NOW_NS);
        asm.alu64(Alu::Add, R4, Operand::X(R2));
        for _ in 0..TRIES {
            let is_busy = asm.label();
            asm.load(Size::Double, R0, R1, port::SENT as i16);
            asm.alu64(Alu::Mov, R5, Operand::X(R0));
            asm.load(Size::Double, R2, FP, NOW_NS);
            asm.jump_if(Cond::Ge, R5, Operand::X(R2), is_busy);
            asm.alu64(Alu::Mov, R5, Operand::X(R2));
            asm.bind(is_busy);
            asm.jump_if(Cond::Gt, R5, Operand::X(R4), policed);
            asm.alu64(Alu::Add, R5, Operand::X(R3));
            asm.alu64(Alu::Mov, R2, Operand::X(R0));
            asm.compare_exchange(R1, port::SENT as i16, R5);
            asm.jump_if(Cond::Eq, R0, Operand::X(R2), may);
        }
        // There was room each time. What it sends is charged in any case, so that the rate is kept.
        asm.atomic_add_at(R1, port::SENT as i16, R3);
        asm.jump(may);
        asm.bind(policed);
        if counts {
            asm.alu64(Alu::Mov, R2, Operand::K(1));
            asm.atomic_add_at(R1, port::POLICED_FRAMES as i16, R2);
            asm.load(Size::Double, R2, FP, LEN);
            asm.atomic_add_at(R1, port::POLICED_BYTES as i16, R2);
        }
        asm.jump(drop);
        asm.bind(may);
    }

    /// Goes on if the sender is known where it comes from and the receiver elsewhere: with the receiver's port in R2,
    /// and its word in R3.
    fn stations(&self, asm: &mut Asm, upcall: Label) {
        // Its sender is known where it comes from.
        self.find(asm, R8, upcall);
        port_of(asm, R2, R1);
        asm.load(Size::Double, R3, FP, NUMBER_IN);
        asm.jump_if(Cond::Ne, R2, Operand::X(R3), upcall);
        let heard = asm.label();
        fresh(asm, upcall);
        // By now R2 has when it was heard, and R3 the time.
        asm.jump_if(Cond::Ge, R2, Operand::X(R3), heard);
        // As one, which is before what follows: the daemon that moves or forgets the station finds it heard, or its word is
        // another one by now (`Slots::close`). Then the frame is the daemon's, which hears it.
        asm.alu64(Alu::Mov, R4, Operand::X(R0));
        asm.alu64(Alu::Mov, R0, Operand::X(R2));
        asm.compare_exchange(R4, Slots::HEARD as i16, R3);
        asm.load(Size::Double, R2, R4, Slots::WORD as i16);
        asm.jump_if(Cond::Ne, R1, Operand::X(R2), upcall);
        asm.bind(heard);
        self.find(asm, R7, upcall);
        fresh(asm, upcall);
        port_of(asm, R2, R1);
        asm.load(Size::Double, R3, FP, NUMBER_IN);
        asm.jump_if(Cond::Eq, R2, Operand::X(R3), upcall);
        asm.store(Size::Double, FP, NUMBER_OUT, R2);
        self.port(asm, R2);
        asm.load(Size::Double, R3, R2, port::WORD as i16);
    }

    /// The frame's bytes, its tag among them; of one that is to be cut, what is in each packet.
    fn length(&self, asm: &mut Asm, upcall: Label) {
        let whole = asm.label();
        asm.load(Size::Word, R1, R6, SKB_LEN);
        asm.load(Size::Word, R2, R6, VLAN_PRESENT);
        asm.alu64(Alu::Shl, R2, Operand::K(2));
        asm.alu64(Alu::Add, R1, Operand::X(R2));
        asm.store(Size::Double, FP, LEN, R1);
        asm.load(Size::Word, R2, R6, GSO_SIZE);
        asm.jump_if(Cond::Eq, R2, Operand::K(0), whole);
        // Without headers, which nobody counts here: a packet may be longer by them.
        asm.alu64(Alu::Mov, R1, Operand::X(R2));
        asm.bind(whole);
        asm.load(Size::Double, R2, R9, header::LONGEST as i16);
        asm.jump_if(Cond::Gt, R1, Operand::X(R2), upcall);
    }

    /// Which port it came in by: its number on the stack, the port in R4.
    fn door(&self, asm: &mut Asm, upcall: Label) {
        let found = asm.label();
        asm.load(Size::Word, R1, R6, IFINDEX);
        asm.alu64(Alu::Mov, R2, Operand::X(R1));
        for _ in 0..DOOR_PROBES {
            asm.alu64(Alu::And, R2, Operand::K(DOORS - 1));
            asm.alu64(Alu::Mov, R3, Operand::X(R2));
            asm.alu64(Alu::Shl, R3, Operand::K(3));
            asm.alu64(Alu::Add, R3, Operand::X(R9));
            asm.load(Size::Double, R4, R3, DOORS_AT as i16);
            asm.alu32(Alu::Mov, R5, Operand::X(R4));
            asm.jump_if(Cond::Eq, R5, Operand::X(R1), found);
            asm.jump_if(Cond::Eq, R4, Operand::K(0), upcall);
            asm.alu64(Alu::Add, R2, Operand::K(1));
        }
        asm.jump(upcall);
        asm.bind(found);
        asm.alu64(Alu::Shr, R4, Operand::K(32));
        asm.store(Size::Double, FP, NUMBER_IN, R4);
        self.port(asm, R4);
    }

    /// From a port's number to the port.
    fn port(&self, asm: &mut Asm, number: Reg) {
        asm.alu64(Alu::And, number, Operand::K(self.layout.ports - 1));
        asm.alu64(Alu::Mul, number, Operand::K(PORT_BYTES));
        asm.alu64(Alu::Add, number, Operand::X(R9));
        asm.alu64(Alu::Add, number, Operand::K(self.layout.ports_at()));
    }

    /// This processor's slot, in R0.
    fn slot(&self, asm: &mut Asm) {
        asm.call(GET_SMP_PROCESSOR_ID);
        asm.alu64(Alu::And, R0, Operand::K(self.layout.cpus - 1));
        asm.alu64(Alu::Mul, R0, Operand::K(CPU_BYTES));
        asm.alu64(Alu::Add, R0, Operand::X(R9));
        asm.alu64(Alu::Add, R0, Operand::K(CPUS_AT));
    }

    /// The slot of an address in the table, in R0, and its word in R1. As `Table::place`, but for the end: the
    /// daemon looks on where this gives up.
    ///
    /// The word is loaded, then the key, then the word again, each from an address that depends on what was loaded
    /// before: so every processor loads in this order (`table/slots.rs` has the writer's).
    fn find(&self, asm: &mut Asm, key: Reg, missing: Label) {
        let found = asm.label();
        asm.load(Size::Double, R1, R9, header::SECRET as i16);
        asm.alu64(Alu::Xor, R1, Operand::X(key));
        asm.load(Size::Double, R2, R9, header::SECRET as i16 + 8);
        asm.alu64(Alu::Mul, R1, Operand::X(R2));
        asm.alu64(Alu::Mov, R3, Operand::X(R1));
        asm.alu64(Alu::Shr, R3, Operand::K(32));
        asm.alu64(Alu::Xor, R1, Operand::X(R3));
        asm.alu64(Alu::Mul, R1, Operand::X(R2));
        asm.alu64(Alu::Shr, R1, Operand::K(32));
        for probe in 0..PROBES {
            asm.load(Size::Double, R2, R9, header::MASK as i16);
            asm.alu64(Alu::And, R1, Operand::X(R2));
            asm.store(Size::Word, FP, INDEX, R1);
            asm.map(R1, self.table.map());
            stack(asm, R2, INDEX);
            asm.call(MAP_LOOKUP_ELEM);
            asm.jump_if(Cond::Eq, R0, Operand::K(0), missing);
            asm.load(Size::Double, R1, R0, Slots::WORD as i16);
            after(asm, R3, R1);
            asm.load(Size::Double, R2, R3, Slots::KEY as i16);
            asm.jump_if(Cond::Eq, R2, Operand::X(key), found);
            asm.jump_if(Cond::Eq, R2, Operand::K(0), missing);
            if probe + 1 < PROBES {
                asm.load(Size::Word, R1, FP, INDEX);
                asm.alu64(Alu::Add, R1, Operand::K(1));
            }
        }
        asm.jump(missing);
        asm.bind(found);
        after(asm, R3, R2);
        asm.load(Size::Double, R2, R3, Slots::WORD as i16);
        asm.jump_if(Cond::Ne, R1, Operand::X(R2), missing);
        asm.jump_if(Cond::Set, R1, Operand::K(1), missing);
    }
}

/// `dst` is R0, and is not known before `loaded` is.
fn after(asm: &mut Asm, dst: Reg, loaded: Reg) {
    asm.alu64(Alu::Mov, dst, Operand::X(loaded));
    asm.alu64(Alu::And, dst, Operand::K(0));
    asm.alu64(Alu::Add, dst, Operand::X(R0));
}

/// The port in a slot's word.
fn port_of(asm: &mut Asm, dst: Reg, word: Reg) {
    asm.alu64(Alu::Mov, dst, Operand::X(word));
    asm.alu64(Alu::Shr, dst, Operand::K(Slots::PORT_SHIFT));
    asm.alu64(Alu::And, dst, Operand::K(0xffff));
}

/// The station of the slot in R0, whose word R1 has, was heard lately, or never moves. R2: when it was heard, R3: now.
fn fresh(asm: &mut Asm, old: Label) {
    let fresh = asm.label();
    asm.load(Size::Double, R2, R0, Slots::HEARD as i16);
    asm.load(Size::Double, R3, FP, NOW_S);
    asm.alu64(Alu::Mov, R4, Operand::X(R1));
    asm.alu64(Alu::Shr, R4, Operand::K(Slots::PINNED_SHIFT));
    asm.jump_if(Cond::Set, R4, Operand::K(1), fresh);
    asm.jump_if(Cond::Ge, R2, Operand::X(R3), fresh);
    asm.alu64(Alu::Mov, R4, Operand::X(R3));
    asm.alu64(Alu::Sub, R4, Operand::X(R2));
    asm.load(Size::Double, R5, R9, header::AGE as i16);
    asm.jump_if(Cond::Gt, R4, Operand::X(R5), old);
    asm.bind(fresh);
}

/// The keys of a frame's addresses in VLAN 0, to R7, and R8 for its source, and to the stack.
fn keys(asm: &mut Asm, base: Reg, off: i16) {
    asm.load(Size::Double, R7, base, off);
    asm.load(Size::Word, R4, base, off + 8);
    asm.network_order(R7, Size::Double);
    asm.network_order(R4, Size::Word);
    asm.alu64(Alu::Mov, R8, Operand::X(R7));
    asm.alu64(Alu::And, R8, Operand::K(0xffff));
    asm.alu64(Alu::Shl, R8, Operand::K(32));
    asm.alu64(Alu::Or, R8, Operand::X(R4));
    asm.alu64(Alu::Shr, R7, Operand::K(16));
    // A key that is in use.
    set_bit(asm, R7, 63);
    set_bit(asm, R8, 63);
    asm.store(Size::Double, FP, TO, R7);
    asm.store(Size::Double, FP, FROM, R8);
}

/// R5 is lost.
fn set_bit(asm: &mut Asm, dst: Reg, bit: u32) {
    asm.alu64(Alu::Mov, R5, Operand::K(1));
    asm.alu64(Alu::Shl, R5, Operand::K(bit));
    asm.alu64(Alu::Or, dst, Operand::X(R5));
}

fn stack(asm: &mut Asm, dst: Reg, off: i16) {
    asm.alu64(Alu::Mov, dst, Operand::X(FP));
    asm.alu64(Alu::Add, dst, Operand::K(i32::from(off).cast_unsigned()));
}

/// Slots of the table that are looked at for an address.
pub(super) const PROBES: u32 = 16;
/// What the classifier says of a frame that is not forwarded (`TC_ACT_SHOT`).
pub(super) const SHOT: u32 = 2;
/// What the daemon is told of a frame that it must look at itself.
pub(super) const REFER: u32 = 3;
/// Bits of a verdict: it is forwarded, to the port whose word is below; it is the daemon's; it is dropped.
const FORWARD: u32 = 63;
const TO_DAEMON: u32 = 62;
const DROP: u32 = 61;
/// The bit of an interface's number that says that it is a port's.
pub(super) const INNER: u32 = 31;
/// How often who moves on what a port has sent tries it.
const TRIES: u32 = 4;
/// Bytes of a frame's addresses.
const ADDRESSES: u32 = 12;

/// On the stack: the keys of the addresses, the frame's begin, and what is looked at later.
const TO: i16 = -8;
const FROM: i16 = -16;
const HEAD: i16 = -32;
const NOW_S: i16 = -40;
const PORT_IN: i16 = -48;
const NUMBER_IN: i16 = -56;
const LEN: i16 = -64;
const INDEX: i16 = -72;
const NOW_NS: i16 = -80;
const NUMBER_OUT: i16 = -88;

/// Parts of `struct __sk_buff`.
const SKB_LEN: i16 = 0;
const PKT_TYPE: i16 = 4;
const VLAN_PRESENT: i16 = 20;
const IFINDEX: i16 = 40;
const DATA: i16 = 76;
const DATA_END: i16 = 80;
const WIRE_LEN: i16 = 160;
const GSO_SIZE: i16 = 176;
/// `PACKET_OUTGOING`
const OUTGOING: u32 = 4;

/// The kernel's helpers (`enum bpf_func_id`).
const MAP_LOOKUP_ELEM: u32 = 1;
const KTIME_GET_NS: u32 = 5;
const GET_SMP_PROCESSOR_ID: u32 = 8;
const REDIRECT: u32 = 23;
const SKB_LOAD_BYTES: u32 = 26;
