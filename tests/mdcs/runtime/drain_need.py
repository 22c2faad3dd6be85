import sys,random,dataclasses; sys.path.insert(0,"/work/main")
from mdcs.profile import *; from mdcs.link import Link; from mdcs.plan import *; from mdcs.ledger import *
from mdcs.schedulers import Mix; from mdcs.schedulers.random_order import RandomOrder
def prof(n,sizes,live):
    units=tuple(Unit(f"u{i}",(sizes[i],),True,(i,i),(n-1-i,n-1-i)) for i in range(n))
    slots=tuple(Slot(i,"F",1e-3,live,live) for i in range(n))+tuple(Slot(n-1-i,"B",1e-3,live,live) for i in range(n))
    return Profile(units,slots,2,Link.uniform(1,50),Optimizer("adam",2,4,2))
def at_turn(plan):
    ledger=Ledger(plan); issued=SlotLimits(plan).issued; held=ledger.rest_bytes; grads={}
    for round_ in range(3):
        sent=0
        for q in range(plan.period.turn if round_==0 else 0, plan.period.length):
            slot=ledger.slots[q]
            for i in range(sent,issued[q]):
                if round_==0 and not plan.in_prologue(plan.messages[i]): continue
                e=ledger.messages[i]; held+=e.held-e.freed
            sent=issued[q]
            if round_==2 and q==plan.period.turn:
                h=held; worst=0
                for i in range(sent,len(plan.messages)):
                    e=ledger.messages[i]
                    if plan.messages[i].kind.is_gather: continue
                    worst=max(worst,h+e.transient+e.shards_held+slot.live)
                    h-=e.freed
                return worst
            held+=slot.allocated
            held-=slot.freed
