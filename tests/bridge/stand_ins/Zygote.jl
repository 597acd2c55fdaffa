# A stand-in for Zygote, which Lux only needs to be loaded.
module Zygote
end
